"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) that keeps the latents of earlier segments, and
the rotary part of their keys, which all heads share, instead of keys and values: in DeepSeek-V3 r + p = 576 numbers per
token instead of h·(d + e) = 40960. A segment projects the latents of its prefix up again, together with its own, so any
kind of linear layer computes all gradients in its own backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...process.patches import patched_on, wrapping
from ..kernels import Gradients
from ..segment import Segment
from .kv_cache import KVCache
from .segment_attention import SegmentAttention

_READ_AT_ONCE = 8  # kernels of GPUs read so many numbers of 16 bits at once, from a multiple of that on
LARGEST_SHARE = 1 / 8  # the largest time of projecting the prefix up again, relative to attention to it


def keep_latents(layer: torch.nn.Module) -> None:
    """Let a layer of multi-latent attention keep latents, if projecting them up again in the backward gives the same.

    Other layers stay as they are, among them multi-latent attention
    - whose projection or attention is recomputed alone, from its arguments, which lack the prefix,
    - whose tokens or heads are divided among ranks,
    - in 8 or 4 bits, whose scales belong to a context that the backward does not have,
    - with a window, before which nothing is kept.
    """
    if not isinstance(layer, MLASelfAttention) or not isinstance(layer.core_attention, SegmentAttention):
        return
    config = layer.config
    attention = layer.core_attention
    projection = layer.linear_kv_up_proj
    recomputed = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    recomputes_a_part = not recomputed.isdisjoint(("core_attn", "mla_up_proj"))
    shares_tokens = config.sequence_parallel or attention.exchange is not None
    in_few_bits = config.fp8 or config.fp4
    has_window = attention.training_rule.window is not None
    is_patched = "forward" in vars(projection)  # by an earlier call
    if not (recomputes_a_part or shares_tokens or in_few_bits or has_window or is_patched):
        reason = "projects the latents of its own segment only"
        patched_on([projection], [wrapping("torch.nn.Module.forward", partial(_with_prefix, layer), reason)])


def share_of_projection(config: Any, length: int) -> float:
    """FLOPs of projecting a prefix token up again, relative to those of attention to it by the `length` queries of a
    segment. The backward takes three times the forward of the projection, two and a half times that of attention."""
    sizes = config.qk_head_dim + config.v_head_dim
    attended = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    return 4 * config.kv_lora_rank * sizes / (3.5 * attended * length)


def _with_prefix(
    layer: MLASelfAttention, _: torch.nn.Module, forward: Callable[..., Any], latent: Tensor
) -> tuple[Tensor, Any]:
    attention = layer.core_attention
    context = attention.segment_context
    segment = context.segment
    if segment is None or segment.is_whole_sequence or context.splits_backwards:
        return forward(latent)

    def make() -> KVCache:
        config = layer.config
        if share_of_projection(config, segment.length) <= LARGEST_SHARE:
            return LatentCache(segment.sequence_length, forward, config.qk_head_dim)
        # Only the sizes of heads, types and device count.
        query = latent.new_empty(0, 1, 1, config.qk_head_dim + config.qk_pos_emb_head_dim)
        value = latent.new_empty(0, 1, 1, config.v_head_dim)
        return attention.new_cache(segment, query, value)

    cache = context.carried(attention, make)  # chosen with the first segment
    return cache.project(latent, segment) if isinstance(cache, LatentCache) else forward(latent)


class LatentCache(KVCache):
    """Latents [S, b, r] and rotary keys [S, b, p]. `project_up` is the layer's projection, from latents [m, b, r] to
    the keys without positions and the values of all heads, [m, b, h·(d + e)]; `size` is d."""

    def __init__(self, length: int, project_up: Callable[[Tensor], tuple[Tensor, Any]], size: int) -> None:
        super().__init__(length)
        self._project_up = project_up
        self._size = size
        self._heads = 0
        self.latents, self.rotary = self.rows
        self._projected: Tensor | None = None  # prefix and running segment projected up

    def project(self, latent: Tensor, segment: Segment) -> tuple[Tensor, Any]:
        """Project the latents [n, b, r] of a segment up, together with those of its prefix; returns the segment's."""
        output, bias = self._project_up(_Join.apply(latent, self, segment))
        self.prefix, own = output.split([segment.start, segment.length])
        self._projected = output.detach()
        return own, bias

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        """Keep the rotary part of the keys [n, b, h, d + p], which is the same in all heads."""
        self._heads = key.shape[2]
        self.rotary.write(start, end, key[:, :, 0, self._size :])

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Like `KVCache.read`, with g = h and keys of size d + p. Projects up again unless `project` just did."""
        projected = self._projected
        self._projected = None
        self.prefix = None
        if projected is None:
            projected, _ = self._project_up(self.latents.read(start, end))
        projected = projected.unflatten(2, (self._heads, -1))
        rotary = self.rotary.read(start, end).unsqueeze(2).expand(-1, -1, self._heads, -1)
        keys = projected[..., : self._size]
        values = projected[..., self._size :]
        if self._size % _READ_AT_ONCE or projected.shape[3] % _READ_AT_ONCE:
            values = values.contiguous()
        return torch.cat([keys, rotary], -1), values

    def tensors(self) -> list[Tensor]:
        projected = [] if self._projected is None else [self._projected]
        return [*super().tensors(), *projected]

    def exchange_gradients(self, start: int, end: int, grads: Gradients) -> tuple[Tensor, Tensor, Tensor | None]:
        """Exchanges those of the rotary keys; those of the prefix, [start, b, h·(d + e)], go through the projection."""
        size = self._size
        length = end - start
        own = grads.key[-length:].clone()
        # The shared rotary part gets the sum of the gradients of all heads, through the first head.
        own[..., size:] = 0
        own[:, :, 0, size:] = self.rotary.exchange(start, end, grads.key[..., size:].sum(2))
        if len(grads.key) == length:
            return own, grads.value, None
        of_prefix = torch.cat([grads.key[:-length, ..., :size], grads.value[:-length]], -1).flatten(2)
        of_prefix = torch.nn.functional.pad(of_prefix, (0, 0, 0, 0, start - len(of_prefix), 0))
        return own, grads.value[-length:], of_prefix


class _Join(torch.autograd.Function):
    """The latents of a segment, joined to those of its prefix."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, cache: LatentCache, segment: Segment) -> Tensor:
        ctx.rows = cache.latents
        ctx.span = (segment.start, segment.end)
        ctx.rows.write(*ctx.span, latent)
        # `data` has a version of its own, since the projection saves it and later segments write to the buffer.
        return ctx.rows.read(*ctx.span).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.rows.exchange(*ctx.span, grad.clone()), None, None
