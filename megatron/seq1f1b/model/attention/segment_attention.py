"""Causal self-attention of one segment over the keys and values of its whole prefix.

It replaces Megatron's `core_attention`, between the rotary embedding and the output projection. Without a running
segment it is what it replaced, or plain causal attention on the same kernel, so that schedules can be compared.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import (
    AttentionRule,
    Kernel,
    KernelChoice,
    Padded,
    RunOnce,
    Saved,
    WithSink,
    default_generator,
    on_parts,
)
from ..masks import KEEP_APART
from ..segment import Segment, SegmentContext
from .head_exchange import HeadExchange
from .kv_cache import KVCache


class SegmentAttention(torch.nn.Module):
    """Drop-in for `core_attention`: query [n, b, h, d], key [n, b, g, d] and value [n, b, g, e] to context [n, b, h·e].

    n tokens of the running segment, b sequences, h query and g KV heads of this tensor-parallel rank; g divides h and
    is never expanded. With an `exchange`, the n tokens are those of this context-parallel rank, which attends with its
    share of the heads, and of the queries if ranks have the same heads. Besides its KVCache a layer keeps query, output
    and log-sum-exp: b·h·((d + e)·w + 4) bytes per token for w bytes an element.

    `outside` attends where no segment runs: what a program computes beside the steps of its schedule is its own affair.
    """

    outside: Any

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        kernels: KernelChoice | None = None,
        window: int | None = None,
        sink: Tensor | None = None,
        exchange: HeadExchange | None = None,
        outside: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        scale = softmax_scale or config.softmax_scale or 1.0 / sqrt(config.kv_channels)
        self.training_rule = AttentionRule(scale, config.attention_dropout, window)
        self.evaluation_rule = AttentionRule(scale, window=window)
        self.config = config
        self.softmax_offset = sink  # Megatron's name of the parameter
        self.exchange = exchange
        # Not by PyTorch's own way, which makes it a part of this module, with names of its own in checkpoints.
        object.__setattr__(self, "outside", outside)
        self.kernels = kernels or KernelChoice()
        self.segment_context = SegmentContext()  # until `attach` replaces it by the executor's

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        context = self.segment_context
        segment = context.segment
        if segment is None and self.outside is not None:
            return self.outside.train(self.training)(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
            )
        is_causal = attn_mask_type in (None, AttnMaskType.causal) and attention_bias is None
        if not is_causal or packed_seq_params is not None:
            raise ValueError(
                f"attention got packed_seq_params, a bias or a mask of type {getattr(attn_mask_type, 'name', None)}, "
                f"but segments attend causally and across documents; {KEEP_APART}, or drop --sequence-splits"
            )
        sink = self.softmax_offset
        if self.exchange is not None:
            query, key, value = self.exchange.to_heads(query, key, value)
            sink = None if sink is None else self.exchange.own_heads(sink)
        rule = self._rule
        kernel = self._kernel(rule, query, value, sink)
        # Without a segment, or for a whole sequence, keys and values are those of the call.
        cached = None
        prefix = None
        if segment is not None and not segment.is_whole_sequence:
            assert key.shape[0] == segment.length, (
                f"attention got {key.shape[0]} tokens for a segment of {segment.length}: the batch was not cut"
            )
            cache = context.carried(self, partial(self.new_cache, segment, query, value))
            cached = _Cached(cache, segment, context.at_end_of_backward(self))
            prefix = cache.prefix
        # Tensor-parallel ranks drop different weights; Megatron forks the generator itself for sequence parallelism.
        draws = rule.dropout and not self.config.sequence_parallel
        around = get_cuda_rng_tracker().fork() if draws else nullcontext()
        with around:
            output = _Attend.apply(query, key, value, sink, prefix, kernel, cached)
        if cached is not None:
            context.end_forward(self, output)
        return output if self.exchange is None else self.exchange.to_tokens(output)

    @property
    def hidden_size_per_attention_head_v(self) -> int:
        """That of the attention outside, which Megatron sets around a call for latents in packs."""
        return self.outside.hidden_size_per_attention_head_v

    @hidden_size_per_attention_head_v.setter
    def hidden_size_per_attention_head_v(self, size: int) -> None:
        self.outside.hidden_size_per_attention_head_v = size

    def new_cache(self, segment: Segment, query: Tensor, value: Tensor) -> KVCache:
        """An empty cache for the micro-batch of a segment, whose heads have the sizes of this query and value."""
        kernel = self.kernels.kernel(self._rule, query, value)
        side_by_side = isinstance(kernel, Padded) and kernel.takes_values_beside_keys(query.shape[3], value.shape[3])
        return KVCache(segment.sequence_length, self._rule.window, side_by_side)

    @property
    def _rule(self) -> AttentionRule:
        return self.training_rule if self.training else self.evaluation_rule

    def _kernel(self, rule: AttentionRule, query: Tensor, value: Tensor, sink: Tensor | None) -> Kernel:
        """The kernel for these queries, within documents; it runs once if attention is kept."""
        kernel = self.kernels.kernel(rule, query, value)
        if sink is not None:
            kernel = WithSink(kernel, sink)
        length = len(value)
        context = self.segment_context
        segment = context.segment
        runs = ((0, length),) if self.exchange is None else self.exchange.own_queries(length)
        kernel = on_parts(kernel, segment, rule.window, runs, query)
        if segment is None or not context.keeps_for_backward or context.kept_attention is None:
            return kernel
        generator = default_generator(query.device) if rule.dropout else None
        return RunOnce(
            kernel=kernel,
            kept=context.kept_attention,
            keep=context.host_memory.keep,
            unit=(self, segment.microbatch, segment.index),
            generator=generator,
        )

    # Megatron's saves the sink of the heads of this tensor-parallel rank, by `softmax_offset` and `tp_group`.
    sharded_state_dict = DotProductAttention.sharded_state_dict

    @property
    def tp_group(self) -> Any:
        return get_tensor_model_parallel_group()


class _Cached(NamedTuple):
    """The `cache` with the keys and values of a segment and its prefix; the backward calls `end` when it is through."""

    cache: KVCache
    segment: Segment
    end: Callable[[], object]


class _Attend(torch.autograd.Function):
    """Attention; keys and values of a segment go to the cache, since later segments write to the same buffers."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        prefix: Tensor | None,
        kernel: Kernel,
        cached: _Cached | None,
    ) -> Tensor:
        ctx.kernel = kernel
        ctx.cached = cached
        query = query.contiguous()  # a view would keep the whole output of the projection
        kept: tuple[Tensor, ...] = ()
        if cached is None:
            key = key.contiguous()
            value = value.contiguous()
            kept = (key, value)
        else:
            cache, segment, _ = cached
            cache.write(segment.start, segment.end, key, value)
            key, value = cache.read(segment.start, segment.end)
        output, statistics = kernel.forward(query, key, value)
        ctx.save_for_backward(query, output, *kept, *statistics)
        return output.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        cached: _Cached | None = ctx.cached
        query, output, *statistics = ctx.saved_tensors
        if cached is None:
            key, value, *statistics = statistics
        else:
            cache, segment, end = cached
            key, value = cache.read(segment.start, segment.end)
        saved = Saved(query=query, key=key, value=value, output=output, statistics=tuple(statistics))
        grads = ctx.kernel.backward(grad_output.view_as(output), saved)
        grad_key = grads.key
        grad_value = grads.value
        grad_prefix = None
        if cached is not None:
            grad_key, grad_value, grad_prefix = cache.exchange_gradients(segment.start, segment.end, grads)
            end()
        # In the order of the arguments of forward(), the last two of which have no gradient.
        return grads.query, grad_key, grad_value, grads.sink, grad_prefix, None, None
