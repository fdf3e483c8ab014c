"""A Megatron model on one segment: attention with a KV cache, positions that start where the segment starts."""

from .attach import attach, use_segment_attention
from .segment import Segment, SegmentContext

__all__ = ["Segment", "SegmentContext", "attach", "use_segment_attention"]
