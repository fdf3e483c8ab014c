"""The kernels of the package flash-attn-4 (`flash_attn.cute`), for Hopper GPUs and later."""

import torch
from torch import Tensor

from .interface import AttentionRule, Gradients, Saved


class FlashAttention4:
    """bf16 and fp16; grouped KV heads; no dropout.

    Head sizes are multiples of 8, those of queries and values may differ. Hopper takes all up to 256; Blackwell takes
    those up to 128, 192 with values of 128, and 256.
    """

    def __init__(self, rule: AttentionRule) -> None:
        from flash_attn.cute import interface

        assert rule.dropout == 0, "the kernel has no dropout"
        self._rule = rule
        self._forward, self._backward = interface._flash_attn_fwd, interface._flash_attn_bwd

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, logsumexp, *_ = self._forward(
            *(x.transpose(0, 1) for x in (query, key, value)),
            softmax_scale=self._rule.scale,
            causal=True,
            return_lse=True,
        )
        return output.transpose(0, 1).flatten(2).contiguous(), (logsumexp,)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, (logsumexp,) = saved
        heads = query.shape[2], value.shape[3]
        grads = self._backward(
            *(x.transpose(0, 1) for x in (query, key, value)),
            *(x.unflatten(2, heads).transpose(0, 1) for x in (output, grad_output)),
            logsumexp,
            softmax_scale=self._rule.scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return Gradients.of_all_keys(*(x.transpose(0, 1) for x in grads[:3]))
