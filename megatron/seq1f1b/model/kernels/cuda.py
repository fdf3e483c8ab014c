"""PyTorch's CUDA flash attention operators, which align their causal mask bottom-right: one call per segment."""

import torch
from torch import Tensor

from .interface import CumulativeLengths, Gradients

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class CudaFlash:
    """bf16 and fp16; heads of one size, a multiple of 8 up to 256; grouped KV heads without expansion; dropout."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        lengths = None, None, query.shape[0], key.shape[0]
        output, saved = _forward(*(x.transpose(0, 1) for x in (query, key, value)), lengths, scale, dropout)
        return output.transpose(0, 1).flatten(2).contiguous(), saved

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
        lengths = None, None, query.shape[0], key.shape[0]
        tensors = grad_output.reshape(query.shape), query, key, value, output.reshape(query.shape)
        grads = _backward(*(x.transpose(0, 1) for x in tensors), saved, lengths, scale, dropout)
        grad_query, grad_key, grad_value = (x.transpose(0, 1) for x in grads)
        return Gradients.of_all_keys(grad_query, grad_key, grad_value, start)

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return _forward(query, key, value, lengths, scale, dropout)

    def backward_packed(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        saved: tuple[Tensor, ...],
        lengths: CumulativeLengths,
        scale: float,
        dropout: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(grad_output, query, key, value, output, saved, lengths, scale, dropout)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple, scale: float, dropout: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    # The random state comes as two tensors, of which some versions of PyTorch leave one unused.
    output, logsumexp, *rng_state, _ = _flash(query, key, value, *lengths, dropout, True, False, scale=scale)
    return output, (logsumexp, *rng_state)


def _backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    saved: tuple[Tensor, ...],
    lengths: tuple,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    logsumexp, *rng_state = saved
    return _flash_backward(
        grad_output, query, key, value, output, logsumexp, *lengths, dropout, True, *rng_state, scale=scale
    )
