"""Models that get documents in Megatron's packed format although their segments have them."""

import torch

from .segment import SegmentContext


def drop_packed_format(chunk: torch.nn.Module, context: SegmentContext) -> None:
    """Make a model chunk ignore `packed_seq_params` while `context` has a running segment with documents.

    Its rotary positions then count from the start of the sequence instead of the document, which comes to the same:
    rotary attention depends on differences of positions only.
    """
    if not hasattr(chunk, "segment_context"):
        chunk.register_forward_pre_hook(_without_packed_format, with_kwargs=True)
    chunk.segment_context = context


def _without_packed_format(chunk: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    segment = chunk.segment_context.segment
    if segment is not None and segment.documents is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "packed_seq_params"}
    return args, kwargs
