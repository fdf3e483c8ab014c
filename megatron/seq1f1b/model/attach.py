"""Bring segments to the modules of a Megatron model, whatever layer specification built it."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ..patches import patched_on, wrapping
from . import experts, recurrent_layers
from .attention import SegmentAttention
from .latents import keep_latents
from .masks import KEEP_APART
from .segment import SegmentContext
from .self_attention import use_segment_attention


def attach(chunks: Iterable[torch.nn.Module], context: SegmentContext) -> None:
    """Make the modules of the model chunks follow the running segment of `context`.

    The latest call wins, so that several executors can take turns on one model.
    """
    others = [chunk for chunk in chunks if getattr(chunk, "segment_context", None) is not context]
    for chunk in use_segment_attention(others):
        _drop_packed_format(chunk, context)
        keep_latents(chunk)
        for path, module in chunk.named_modules():
            if isinstance(module, SegmentAttention):
                module.context = context
            if isinstance(module, RotaryEmbedding):
                module.path_in_chunk = path
            for kind, follows in _FOLLOWERS:
                if isinstance(module, kind):
                    if not hasattr(module, "segment_context"):
                        patched_on([module], follows)
                    module.segment_context = context


def _drop_packed_format(chunk: torch.nn.Module, context: SegmentContext) -> None:
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


def _at_segment(rotary: torch.nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Rotary positions that begin where the segment does; Megatron's are as many as there are tokens, from 0.

    They are the same in all model chunks, which would keep 4·d bytes a token each, for d rotary dimensions.
    """
    segment = rotary.segment_context.segment
    if segment is None:
        return forward(*args, **kwargs)
    at_segment = partial(forward, *args, **kwargs, offset=segment.start)
    if isinstance(rotary, YarnRotaryEmbedding):  # returns a number, too
        return at_segment()
    return segment.shared((rotary.path_in_chunk, *args, *kwargs.items()), at_segment)


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


_EMBEDDINGS = "megatron.core.models.common.embeddings"
_POSITIONS = (
    wrapping(f"{_EMBEDDINGS}.rotary_pos_embedding.RotaryEmbedding.forward", _at_segment, "begins at position 0"),
    wrapping(
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding.YarnRotaryEmbedding.get_cached_cos_sin",
        _from_segment_start,
        "takes no offset, and begins at 0",
    ),
)

# Modules other than attention that follow the running segment, each with the patches that make it do so.
_FOLLOWERS = (
    (RotaryEmbedding, _POSITIONS),
    (TopKRouter, experts.FOLLOWS),
    (GatedDeltaNet, recurrent_layers.DELTA_NET_FOLLOWS),
    (MambaMixer, recurrent_layers.MAMBA_FOLLOWS),
)
