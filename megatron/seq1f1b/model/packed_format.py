"""Models that are given documents in Megatron's packed format, whose positions are those of the whole sequence."""

import torch

from .masks import KEEP_APART
from .segment import SegmentContext


def drop_packed_format(chunk: torch.nn.Module, context: SegmentContext) -> None:
    """Make a model chunk ignore `packed_seq_params` where the running segment of `context` has documents.

    Where it has none, they raise ValueError.

    Its rotary positions then count from the start of the sequence instead of the document, which comes to the same:
    rotary attention depends on differences of positions only.
    """
    if not hasattr(chunk, "segment_context"):
        chunk.register_forward_pre_hook(_without_packed_format, with_kwargs=True)
    chunk.segment_context = context


def _without_packed_format(chunk: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    segment = chunk.segment_context.segment
    if segment is None or kwargs.get("packed_seq_params") is None:
        return args, kwargs
    if segment.documents is None:
        raise ValueError(
            f"the model got packed_seq_params, but segments attend across documents; {KEEP_APART}, or drop "
            "--sequence-splits"
        )
    return args, {name: value for name, value in kwargs.items() if name != "packed_seq_params"}
