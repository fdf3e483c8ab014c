"""PyTorch's CUDA flash attention operators, which align their causal mask bottom-right: one call per segment."""

import torch
from torch import Tensor

from .interface import Gradients

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class CudaFlash:
    """bf16 and fp16, head sizes up to 256 in multiples of 8; grouped KV heads without expansion; no dropout."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        length, batch, heads, size = query.shape
        output, logsumexp, *_ = _flash(
            *(x.transpose(0, 1) for x in (query, key, value)),
            None,
            None,
            length,
            key.shape[0],
            0.0,
            True,
            False,
            scale=scale,
        )
        return output.transpose(0, 1).reshape(length, batch, heads * size), logsumexp

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        start: int,
        scale: float,
    ) -> Gradients:
        # Without dropout the operator reads no random state, but wants tensors of the right type in its place.
        rng_state, unused = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)
        grads = _flash_backward(
            *(x.reshape(query.shape).transpose(0, 1) for x in (grad_output, query)),
            *(x.transpose(0, 1) for x in (key, value)),
            output.reshape(query.shape).transpose(0, 1),
            logsumexp,
            None,
            None,
            query.shape[0],
            key.shape[0],
            0.0,
            True,
            rng_state,
            unused,
            scale=scale,
        )
        grad_query, grad_key, grad_value = (x.transpose(0, 1) for x in grads)
        prefix = (grad_key[:start], grad_value[:start]) if start else None
        return Gradients(grad_query, grad_key[start:], grad_value[start:], prefix)
