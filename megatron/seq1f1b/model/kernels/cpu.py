"""PyTorch's CPU flash attention, in parts of the keys.

The operator aligns its causal mask top-left. So a segment attends fully to its prefix and causally to itself, and the
log-sum-exps merge the two. The backward needs no merge: from the merged output and log-sum-exp the operator computes
each part's exact share, since the softmax weights of a part are exp(score − logsumexp) with the log-sum-exp of the
whole row.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .interface import AttentionRule, Gradients, Saved

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_KEYS_AT_ONCE = 2048  # of the prefix in the backward; their gradients briefly exist twice


@dataclass(frozen=True)
class CpuFlash:
    """fp32, fp64, bf16 and fp16; grouped KV heads without expansion; heads of one size; no dropout, no window."""

    rule: AttentionRule

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        start, scale = key.shape[0] - query.shape[0], self.rule.scale
        q, k, v = map(_heads_first, (query, key, value))
        output, logsumexp = _flash(q, k[:, :, start:], v[:, :, start:], 0.0, True, scale=scale)
        if start:
            prefix = _flash(q, k[:, :, :start], v[:, :, :start], 0.0, False, scale=scale)
            output, logsumexp = _merge(output, logsumexp, *prefix)
        return output.permute(2, 0, 1, 3).contiguous(), (logsumexp,)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        *tensors, (logsumexp,) = saved
        query, key, value, *_ = tensors
        q, k, v, o, grad = map(_heads_first, (*tensors, grad_output))
        grad_query = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        end = key.shape[0]
        start = end - query.shape[0]
        for part in pairwise((*range(0, start, _KEYS_AT_ONCE), start, end)):
            rows = slice(*part)
            call = grad, q, k[:, :, rows], v[:, :, rows], o, logsumexp, 0.0, part == (start, end)
            of_query, of_key, of_value = _flash_backward(*call, scale=self.rule.scale)
            grad_query += of_query.permute(2, 0, 1, 3)
            grad_key[rows], grad_value[rows] = of_key.permute(2, 0, 1, 3), of_value.permute(2, 0, 1, 3)
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
