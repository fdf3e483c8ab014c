"""FlashAttention. On GPUs all versions align their causal mask bottom-right, so a segment takes one call.

Tested in model/test_kernels.py.
"""

from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from ..packed_documents import CumulativeLengths
from .interface import AttentionRule, DocumentKernel, Gradients, Saved

_flash = torch.ops.aten._flash_attention_forward
# Without the random state, which version 3 fills with zeros; PyTorch 2.11 lacks this operator.
_flash_without_dropout = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
_flash_backward = torch.ops.aten._flash_attention_backward
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_KEYS_AT_ONCE = 2048  # of the prefix in the backward on a CPU; their gradients briefly exist twice


@dataclass(frozen=True)
class CudaFlash(DocumentKernel):
    """PyTorch's operators, which are FlashAttention 2 unless the process has activated version 3: bf16 and fp16; heads
    of one size, a multiple of 8 up to 256; grouped KV heads without expansion; dropout in version 2."""

    rule: AttentionRule

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: CumulativeLengths | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        query, key, value = (_turned(x) for x in (query, key, value))
        common, options = self._common(query, key, documents)
        returns_mask = False
        if self.rule.dropout or _flash_without_dropout is None:
            # The random state has two tensors, one of which some versions of PyTorch do not use. The mask is last.
            output, *statistics, _ = _flash(query, key, value, *common, returns_mask, **options)
        else:
            output = torch.empty_like(query)  # with its strides
            statistics = [_flash_without_dropout(output, query, key, value, *common, returns_mask, **options)]
        return _turned(output).contiguous(), tuple(statistics)

    def backward(self, grad_output: Tensor, saved: Saved, documents: CumulativeLengths | None = None) -> Gradients:
        query, key, value, output = (_turned(x) for x in (saved.query, saved.key, saved.value, saved.output))
        logsumexp, *rng_state = saved.statistics
        if not rng_state:  # nothing reads it
            rng_state = [logsumexp.new_empty(shape, dtype=torch.uint64) for shape in (2, ())]
        common, options = self._common(query, key, documents)
        grad_query, grad_key, grad_value = _flash_backward(
            _turned(grad_output), query, key, value, output, logsumexp, *common, *rng_state, **options
        )
        return Gradients(query=_turned(grad_query), key=_turned(grad_key), value=_turned(grad_value))

    def _common(
        self, query: Tensor, key: Tensor, documents: CumulativeLengths | None
    ) -> tuple[tuple[Any, ...], dict[str, float]]:
        """Arguments of forward and backward: cumulative and largest lengths, dropout, and whether the mask is causal;
        by name the scale and the window."""
        lengths = documents or (None, None, query.shape[1], key.shape[1])
        is_causal = True
        options: dict[str, float] = {"scale": self.rule.scale}
        if self.rule.window is not None:
            options["window_size_left"] = self.rule.window
            options["window_size_right"] = 0
        return (*lengths, self.rule.dropout, is_causal), options


class FlashAttention4:
    """The kernels of the package flash-attn-4 (`flash_attn.cute`): bf16 and fp16; grouped KV heads; no dropout, no
    window. Head sizes are multiples of 8, those of queries and values may differ. Hopper takes all up to 256; Blackwell
    takes those up to 128, 192 with values of 128, and 256."""

    def __init__(self, rule: AttentionRule) -> None:
        if rule.dropout:
            raise ValueError("--flash-attention-version 4 has no attention dropout; drop it or --attention-dropout")
        self._options = {"softmax_scale": rule.scale, "causal": True}
        self._package = import_module("flash_attn.cute.interface")

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        # Later versions return more than the two.
        output, logsumexp, *_ = self._package._flash_attn_fwd(
            _turned(query), _turned(key), _turned(value), return_lse=True, **self._options
        )
        return _turned(output).contiguous(), (logsumexp,)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        (logsumexp,) = saved.statistics
        grad_query, grad_key, grad_value, *_ = self._package._flash_attn_bwd(
            _turned(saved.query),
            _turned(saved.key),
            _turned(saved.value),
            _turned(saved.output),
            _turned(grad_output),
            logsumexp,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._options,
        )
        return Gradients(query=_turned(grad_query), key=_turned(grad_key), value=_turned(grad_value))


def _turned(x: Tensor) -> Tensor:
    """[n, b, h, d] to [b, n, h, d] and back; [n, h, d], of one sequence, stays as it is."""
    return x.transpose(0, 1) if x.dim() == 4 else x


def why_not_3() -> str | None:
    """Why PyTorch's operators cannot run on FlashAttention 3 here; None if they can."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return "install a PyTorch that can switch to it, such as 2.13"
    try:
        import_module("flash_attn_interface")
    except Exception as error:  # of any kind, from its compiler or its loader
        return f"install FlashAttention-3 (the folder hopper of flash-attention); its import fails ({error})"
    return None


@dataclass(frozen=True)
class CpuFlash:
    """PyTorch's operator for CPUs: fp32, fp64, bf16 and fp16; grouped KV heads without expansion; heads of one size; no
    dropout, no window.

    The operator aligns its causal mask top-left. So a segment attends fully to its prefix and causally to itself, and
    the log-sum-exps merge the two; from the merged ones, the backward of each part computes its exact share.
    """

    rule: AttentionRule

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        start = key.shape[0] - query.shape[0]
        scale = self.rule.scale
        q, k, v = map(_heads_first, (query, key, value))
        output, logsumexp = _cpu_flash(q, k[:, :, start:], v[:, :, start:], 0.0, True, scale=scale)
        if start:
            prefix = _cpu_flash(q, k[:, :, :start], v[:, :, :start], 0.0, False, scale=scale)
            output, logsumexp = _merge(output, logsumexp, *prefix)
        return output.permute(2, 0, 1, 3).contiguous(), (logsumexp,)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        (logsumexp,) = saved.statistics
        query = saved.query
        q, k, v = map(_heads_first, (query, saved.key, saved.value))
        o, grad = map(_heads_first, (saved.output, grad_output))
        grad_query = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        grad_key = torch.empty_like(saved.key)
        grad_value = torch.empty_like(saved.value)
        end = saved.key.shape[0]
        start = end - query.shape[0]
        bounds = [*range(0, start, _KEYS_AT_ONCE), start, end]  # of pieces of the prefix, and of the segment
        for first, last in pairwise(bounds):
            rows = slice(first, last)
            is_causal = (first, last) == (start, end)
            no_dropout = 0.0
            of_query, of_key, of_value = _cpu_flash_backward(
                grad, q, k[:, :, rows], v[:, :, rows], o, logsumexp, no_dropout, is_causal, scale=self.rule.scale
            )
            grad_query += of_query.permute(2, 0, 1, 3)
            grad_key[rows] = of_key.permute(2, 0, 1, 3)
            grad_value[rows] = of_value.permute(2, 0, 1, 3)
        return Gradients(grad_query.to(query.dtype), grad_key, grad_value)


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, h, d] as a view [b, h, s, d]; the operator needs a contiguous last dimension only."""
    return x.permute(1, 2, 0, 3)


def _merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over two sets of keys, from the softmax over each: [b, h, n, d] and [b, h, n]."""
    weight = torch.sigmoid(other_logsumexp - logsumexp).unsqueeze(-1)
    # In 16 bits both parts are rounded already; in fp32 only one more rounding follows.
    merged = output.to(weight.dtype).lerp_(other.to(weight.dtype), weight).to(output.dtype)
    return merged, torch.logaddexp(logsumexp, other_logsumexp)
