"""PyTorch's CUDA flash attention operators, which align their causal mask bottom-right: one call per segment."""

import torch
from torch import Tensor

from .interface import Gradients

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class CudaFlash:
    """bf16 and fp16; heads of one size, a multiple of 8 up to 256; grouped KV heads without expansion; dropout."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        length, batch, heads, size = query.shape
        # The random state comes as two tensors, of which some versions of PyTorch leave one unused.
        output, logsumexp, *rng_state, _ = _flash(
            *(x.transpose(0, 1) for x in (query, key, value)),
            None,
            None,
            length,
            key.shape[0],
            dropout,
            True,
            False,
            scale=scale,
        )
        return output.transpose(0, 1).reshape(length, batch, heads * size), (logsumexp, *rng_state)

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
        logsumexp, *rng_state = saved
        grads = _flash_backward(
            *(x.reshape(query.shape).transpose(0, 1) for x in (grad_output, query)),
            *(x.transpose(0, 1) for x in (key, value)),
            output.reshape(query.shape).transpose(0, 1),
            logsumexp,
            None,
            None,
            query.shape[0],
            key.shape[0],
            dropout,
            True,
            *rng_state,
            scale=scale,
        )
        grad_query, grad_key, grad_value = (x.transpose(0, 1) for x in grads)
        prefix = (grad_key[:start], grad_value[:start]) if start else None
        return Gradients(grad_query, grad_key[start:], grad_value[start:], prefix)
