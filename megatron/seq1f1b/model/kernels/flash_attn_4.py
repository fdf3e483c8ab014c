"""The kernels of the package flash-attn-4 (`flash_attn.cute`), for Hopper GPUs and later."""

import torch
from torch import Tensor

from .interface import Gradients


class FlashAttention4:
    """bf16 and fp16; grouped KV heads; no dropout.

    Head sizes are multiples of 8, those of queries and values may differ. Hopper takes all up to 256; Blackwell takes
    those up to 128, 192 with values of 128, and 256.
    """

    def __init__(self) -> None:
        from flash_attn.cute import interface

        self._forward, self._backward = interface._flash_attn_fwd, interface._flash_attn_bwd

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert dropout == 0, "the kernel has no dropout"
        output, logsumexp, *_ = self._forward(
            *(x.transpose(0, 1) for x in (query, key, value)), softmax_scale=scale, causal=True, return_lse=True
        )
        return output.transpose(0, 1).flatten(2).contiguous(), (logsumexp,)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        saved: tuple[Tensor, ...],
        start: int,
        scale: float,
        dropout: float,
    ) -> Gradients:
        (logsumexp,) = saved
        heads = query.shape[2], value.shape[3]
        grads = self._backward(
            *(x.transpose(0, 1) for x in (query, key, value)),
            *(x.unflatten(2, heads).transpose(0, 1) for x in (output, grad_output)),
            logsumexp,
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query, grad_key, grad_value = (x.transpose(0, 1) for x in grads[:3])
        return Gradients.of_all_keys(grad_query, grad_key, grad_value, start)
