"""A Megatron model on one segment: attention with a KV cache, positions that start where the segment
starts, weight gradients apart from input gradients."""

from .attach import (
    add_up_all_weight_gradients,
    attach,
    collectives_watched,
    use_segment_attention,
    weight_gradients_left_in,
)
from .documents import Documents
from .segment import Segment, SegmentContext
from .weight_gradient import WeightGradientStore

__all__ = [
    "Documents",
    "Segment",
    "SegmentContext",
    "WeightGradientStore",
    "add_up_all_weight_gradients",
    "attach",
    "collectives_watched",
    "use_segment_attention",
    "weight_gradients_left_in",
]
