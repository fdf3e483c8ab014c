"""Bring segments to the modules of a Megatron model, whatever layer specification built it."""

from collections.abc import Iterable

import torch
from megatron.core.transformer.moe.router import TopKRouter

from .attention import SegmentAttention
from .experts import follow_segments
from .packed_format import drop_packed_format
from .positions import start_positions_at_segment
from .segment import SegmentContext
from .self_attention import use_segment_attention


def attach(chunks: Iterable[torch.nn.Module], context: SegmentContext) -> None:
    """Make the attention, rotary and router modules of the model chunks follow the running segment of `context`.

    The latest call wins, so that several executors can take turns on one model.
    """
    others = [chunk for chunk in chunks if getattr(chunk, "segment_context", None) is not context]
    for chunk in use_segment_attention(others):
        drop_packed_format(chunk, context)
        start_positions_at_segment(chunk, context)
        for module in chunk.modules():
            if isinstance(module, SegmentAttention):
                module.context = context
            elif isinstance(module, TopKRouter):
                follow_segments(module, context)
