"""Rotary positions that begin where the running segment does."""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from ..patches import Patch, PatchTable, Scope, patched_on
from .segment import SegmentContext


def start_positions_at_segment(chunk: torch.nn.Module, context: SegmentContext) -> None:
    """Make the rotary embeddings of a model chunk follow `context`.

    Megatron computes as many positions as there are tokens, starting at 0.
    """
    for rotary in chunk.modules():
        if not isinstance(rotary, (RotaryEmbedding, YarnRotaryEmbedding)):
            continue
        if not hasattr(rotary, "segment_context"):
            rotary.register_forward_pre_hook(_with_offset, with_kwargs=True)
            patched_on([rotary], _CACHED)
        rotary.segment_context = context


def _with_offset(rotary: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    segment = rotary.segment_context.segment
    return args, kwargs if segment is None else {**kwargs, "offset": segment.start}


def _from_segment_start(rotary: torch.nn.Module, cached: Callable, seq_len: int, **kwargs) -> tuple[Tensor, Tensor]:
    """The cache that the fused rotary embedding of multi-latent attention reads instead of calling the module.

    The cosines and sines are those of a longer sequence without its first positions, so that one cache serves all
    segments.
    """
    segment = rotary.segment_context.segment
    if segment is None:
        return cached(seq_len, **kwargs)
    cos, sin = cached(segment.start + seq_len, **kwargs)
    return cos[segment.start :], sin[segment.start :]


_CACHED = PatchTable(
    Scope.MODEL,
    (
        Patch(
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.YarnRotaryEmbedding.get_cached_cos_sin",
            partial(partial, _from_segment_start),
            "takes no offset, and begins at 0",
            wraps=True,
        ),
    ),
)
