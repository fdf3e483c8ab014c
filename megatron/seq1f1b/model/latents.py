"""Multi-latent attention that keeps latents of earlier segments, not their keys and values; see latent_cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..patches import Patch, PatchTable, Scope, patched_on
from .attention import SegmentAttention
from .latent_cache import LatentCache
from .segment import Segment

# Projecting up again may take this part of the time that attention to the prefix takes.
LARGEST_SHARE = 1 / 8


class _Join(torch.autograd.Function):
    """The latents of a segment behind those of its prefix."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, cache: LatentCache, attention: SegmentAttention, segment: Segment) -> Tensor:
        cache.latents.write(segment.start, segment.end, latent)
        ctx.cache, ctx.attention, ctx.segment = cache, attention, segment
        return cache.latents.read(segment.end)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        latents, segment = ctx.cache.latents, ctx.segment
        own, left = grad[segment.start :], latents.take_gradients(segment.start, segment.end)
        if left is not None:
            own = (own + left).to(own.dtype)
        if segment.is_first:
            ctx.attention.context.release(ctx.attention, segment.microbatch)
        else:
            latents.add_gradients(grad[: segment.start])
        return own, None, None, None


def keep_latents(chunk: torch.nn.Module) -> None:
    """Make multi-latent attention keep latents where that takes little time and every gradient finds its way."""
    for layer in chunk.modules():
        if not isinstance(layer, MLASelfAttention) or not isinstance(layer.core_attention, SegmentAttention):
            continue
        projection = layer.linear_kv_up_proj
        if _can(layer) and not hasattr(projection, "layer_of_segments"):
            patched_on([projection], _JOINING)
            # In a tuple, since as a module it would be a part of the projection.
            projection.layer_of_segments = (layer,)


def _can(layer: MLASelfAttention) -> bool:
    """Not where the projection or attention alone are computed again in the backward, from their arguments, nor where
    ranks share tokens or heads, nor in 8 bit, whose context is gone in the backward."""
    config, attention = layer.config, layer.core_attention
    modules = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    return (
        not {"core_attn", "mla_up_proj"} & modules
        and not (config.sequence_parallel or config.fp8 or config.fp4)
        and attention.exchange is None
        and attention.training_rule.window is None
    )


def _with_prefix(linear: torch.nn.Module, forward: Callable[..., Any], latent: Tensor) -> tuple[Tensor, Any]:
    (layer,) = linear.layer_of_segments
    attention = layer.core_attention
    context, segment = attention.context, attention.context.segment
    if segment is None or segment.is_whole_sequence or context.splits_backwards:
        return forward(latent)
    cache = context.find(attention)
    if cache is None and segment.is_first and share_of_projection(layer.config, segment.length) <= LARGEST_SHARE:
        make = partial(LatentCache, segment.sequence_length, forward, layer.config.qk_head_dim)
        cache = context.cache(attention, make)
    if not isinstance(cache, LatentCache):
        return forward(latent)
    return cache.project(_Join.apply(latent, cache, attention, segment), segment)


def share_of_projection(config: Any, length: int) -> float:
    """Of projecting a token of the prefix up again, forward and three times backward, in attending to it, forward and
    two and a half times backward, by the `length` queries of a segment; by FLOPs."""
    sizes = config.qk_head_dim + config.v_head_dim
    attended = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    return 4 * config.kv_lora_rank * sizes / (3.5 * attended * length)


_JOINING = PatchTable(
    Scope.MODEL,
    (
        Patch(
            "torch.nn.Module.forward",
            partial(partial, _with_prefix),
            "projects the latents of its own segment only",
            wraps=True,
        ),
    ),
)
