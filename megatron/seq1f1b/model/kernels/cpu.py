"""PyTorch's CPU flash attention, in two parts per segment.

The operator aligns its causal mask top-left, so a segment is computed as full attention to the prefix plus causal
attention to itself, merged by their log-sum-exps. The backward needs no merge: given the merged output and
log-sum-exp, the operator returns each part's exact share, since the softmax weights of a part are
exp(score − logsumexp) with the log-sum-exp of the whole row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import AttentionRule, Gradients, Saved

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class CpuFlash:
    """fp32, fp64, bf16 and fp16; grouped KV heads without expansion; heads of one size; no dropout."""

    rule: AttentionRule

    def __post_init__(self) -> None:
        assert self.rule.dropout == 0 and self.rule.window is None, "the operator has no dropout and no window"

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        start, scale = key.shape[0] - query.shape[0], self.rule.scale
        q = _heads_first(query)
        output, logsumexp = _flash(q, _heads_first(key[start:]), _heads_first(value[start:]), 0.0, True, scale=scale)
        if start:
            prefix = _flash(q, _heads_first(key[:start]), _heads_first(value[:start]), 0.0, False, scale=scale)
            output, logsumexp = _merge(output, logsumexp, *prefix)
        return output.permute(2, 0, 1, 3).flatten(2).contiguous(), (logsumexp,)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        start, (logsumexp,) = saved.start, saved.statistics
        q, o, grad = (_heads_first(x.reshape(saved.query.shape)) for x in (saved.query, saved.output, grad_output))

        def part(rows: slice, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            k, v = _heads_first(saved.key[rows]), _heads_first(saved.value[rows])
            grads = _flash_backward(grad, q, k, v, o, logsumexp, 0.0, is_causal, scale=self.rule.scale)
            return tuple(x.permute(2, 0, 1, 3) for x in grads)

        grad_query, grad_key, grad_value = part(slice(start, None), True)
        if not start:
            return Gradients(grad_query, grad_key, grad_value, None)
        grad_query_prefix, *grad_prefix = part(slice(start), False)
        return Gradients(grad_query.add_(grad_query_prefix), grad_key, grad_value, tuple(grad_prefix))


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, h, d] as a view [b, h, s, d]; the operator takes any strides with a contiguous last dimension."""
    return x.permute(1, 2, 0, 3)


def _merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over two sets of keys, from the softmax over each: [b, h, n, d] and [b, h, n]."""
    weight = torch.sigmoid(other_logsumexp - logsumexp).unsqueeze(-1)
    # In 16 bits each part is already rounded; blend in fp32 so that only one more rounding follows.
    merged = output.to(weight.dtype).lerp_(other.to(weight.dtype), weight).to(output.dtype)
    return merged, torch.logaddexp(logsumexp, other_logsumexp)
