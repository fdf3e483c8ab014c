"""Causal self-attention of one segment over the keys and values of its whole prefix.

It replaces Megatron's `core_attention`, which stands between the rotary embedding and the output projection. Without a
running segment, or if the segment is the whole sequence, it is plain causal attention on the same kernel, so that
schedules can be compared on equal kernels.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head_exchange import HeadExchange
from .kernels import AttentionRule, Kernel, KernelChoice, RunOnce, Saved, WithSink, default_generator, on_parts
from .kv_cache import KVCache, WindowCache
from .masks import KEEP_APART
from .segment import Segment, SegmentContext


class SegmentAttention(torch.nn.Module):
    """Drop-in for `core_attention`: query [n, b, h, d], key [n, b, g, d] and value [n, b, g, e] to context [n, b, h·e].

    n tokens of the running segment, b sequences, h query and g KV heads of this tensor-parallel rank; g divides h and
    is never expanded. With an `exchange`, the n tokens are those of this context-parallel rank, which attends with its
    share of the heads, and of the queries if ranks have the same heads. The backward needs query, output and
    log-sum-exp: b·h·((d + e)·w + 4) bytes per token for w bytes an element. Keys and values live in the KVCache of the
    micro-batch, with a sliding window in its WindowCache. A query sees at most `window` keys before its own. A `sink`
    [h] is a term in the denominator of each head's softmax; if it is a parameter, it has the name of Megatron's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        kernels: KernelChoice | None = None,
        window: int | None = None,
        sink: Tensor | None = None,
        exchange: HeadExchange | None = None,
    ) -> None:
        super().__init__()
        scale = softmax_scale or config.softmax_scale or 1.0 / sqrt(config.kv_channels)
        self.training_rule = AttentionRule(scale, config.attention_dropout, window)
        self.evaluation_rule = AttentionRule(scale, window=window)
        self.softmax_offset = sink
        self.exchange = exchange
        self.has_own_random_state = not config.sequence_parallel
        self.kernels = kernels or KernelChoice()
        self.context = SegmentContext()  # until `attach` gives it the executor's

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
        segment = self.context.segment
        if attn_mask_type not in (None, AttnMaskType.causal) or attention_bias is not None:
            raise ValueError(
                f"attention with a bias or with a mask of type {getattr(attn_mask_type, 'name', None)} cannot be cut "
                "into segments, which attend causally; drop --sequence-splits"
            )
        if packed_seq_params is not None:
            raise ValueError(
                f"attention got packed_seq_params, but segments attend across documents; {KEEP_APART}, or drop "
                "--sequence-splits"
            )
        # The kernel applies the triangle by itself, within each of the documents of the segment.
        if attention_mask is not None and segment is not None and segment.documents is None:
            self.context.check_mask(attention_mask)
        sink = self.softmax_offset
        if self.exchange is not None:
            query, key, value = self.exchange.to_heads(query, key, value)
            sink = None if sink is None else self.exchange.own_heads(sink)
        rule = self.training_rule if self.training else self.evaluation_rule
        call = _Call(self._kernel(rule, query, value, sink))
        if segment is not None and not segment.is_whole_sequence:
            assert key.shape[0] == segment.length, (
                f"attention got {key.shape[0]} tokens for a segment of {segment.length}: the batch was not cut"
            )
            of = KVCache if rule.window is None else partial(WindowCache, rule.window)
            cache = self.context.cache(self, partial(of, segment.sequence_length))
            call = _Call(call.kernel, segment, cache, partial(self.context.release, self, segment.microbatch))
        with self._random_numbers(rule):
            output = _Attend.apply(query, key, value, sink, call.cache and call.cache.take_prefix(), call)
        if call.cache is not None:
            is_used_again = self.context.expects_backward(output)
            if segment.is_last and not is_used_again:
                call.release()
            elif isinstance(call.cache, WindowCache) and not output.requires_grad:
                call.cache.trim(keeps_earlier=is_used_again)
            if segment.is_last and is_used_again:
                call.cache.rest(self.context.keep)
        return output if self.exchange is None else self.exchange.to_tokens(output)

    def _kernel(self, rule: AttentionRule, query: Tensor, value: Tensor, sink: Tensor | None) -> Kernel:
        """The kernel for these queries, within documents; it runs once if attention is kept."""
        kernel = self.kernels.kernel(rule, query, value)
        if sink is not None:
            kernel = WithSink(kernel, sink)
        length, context, segment = len(value), self.context, self.context.segment
        runs = ((0, length),) if self.exchange is None else self.exchange.own_queries(length)
        kernel = on_parts(kernel, segment, rule.window, runs, query)
        if segment is None or not context.keeps_for_backward or context.kept_attention is None:
            return kernel
        generator = default_generator(query.device) if rule.dropout else None
        return RunOnce(kernel, (self, segment.microbatch, segment.index), context.kept_attention, generator)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sink of the heads of this tensor-parallel rank, as Megatron's own attention saves it."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _random_numbers(self, rule: AttentionRule) -> AbstractContextManager:
        """Each tensor-parallel rank drops other weights; with sequence parallelism Megatron has already forked."""
        return get_cuda_rng_tracker().fork() if rule.dropout and self.has_own_random_state else nullcontext()


class _Call(NamedTuple):
    """A call of `kernel`; for a segment also the cache of its keys and values. The first segment's backward ends with
    `release`."""

    kernel: Kernel
    segment: Segment | None = None
    cache: KVCache | None = None
    release: Callable[[], None] | None = None


class _Attend(torch.autograd.Function):
    """Attention of a whole sequence, or of a segment, whose keys and values go to the cache instead of the graph.

    Later segments write other rows of the same buffers, and save_for_backward would report a modification.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        prefix: Tensor | None,
        call: _Call,
    ) -> Tensor:
        query = query.contiguous()  # a view would keep all that the projection computed
        if call.cache is None:
            key, value = key.contiguous(), value.contiguous()
            output, statistics = call.kernel.forward(query, key, value)
            ctx.save_for_backward(query, output, *statistics, key, value)
        else:
            segment = call.segment
            call.cache.write(segment.start, segment.end, key, value)
            output, statistics = call.kernel.forward(query, *call.cache.read(segment.start, segment.end))
            ctx.save_for_backward(query, output, *statistics)
        ctx.call = call
        return output.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        kernel, segment, cache, release = ctx.call
        query, output, *statistics = ctx.saved_tensors
        grad_output = grad_output.view_as(output)
        if cache is None:
            *statistics, key, value = statistics
            grads = kernel.backward(grad_output, Saved(query, key, value, output, tuple(statistics)))
            return grads.query, grads.key, grads.value, grads.sink, None, None
        keys, values = cache.read(segment.start, segment.end)
        grads = kernel.backward(grad_output, Saved(query, keys, values, output, tuple(statistics)))
        key, value, prefix = cache.exchange_gradients(segment.start, segment.end, grads)
        if segment.is_first:
            release()
        return grads.query, key, value, grads.sink, prefix, None
