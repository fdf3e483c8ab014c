"""The kernels of the package flash-attn, version 2.7 and later (arXiv 2307.08691)."""

import torch
from torch import Tensor

from .interface import CumulativeLengths, Gradients


class FlashAttention2:
    """bf16 and fp16; heads of one size, a multiple of 8 up to 256; grouped KV heads; dropout."""

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self._package = flash_attn_interface

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, logsumexp, _, rng_state = self._package._flash_attn_forward(
            *(x.transpose(0, 1) for x in (query, key, value)),
            **_common(scale, dropout),
            return_softmax=False,
        )
        return output.transpose(0, 1).flatten(2).contiguous(), (logsumexp, rng_state)

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
        logsumexp, rng_state = saved
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        grads = [torch.empty_like(x) for x in (q, k, v)]
        self._package._flash_attn_backward(
            grad_output.reshape(query.shape).transpose(0, 1),
            q,
            k,
            v,
            output.reshape(query.shape).transpose(0, 1),
            logsumexp,
            *grads,
            **_common(scale, dropout),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=rng_state,
        )
        grad_query, grad_key, grad_value = (x.transpose(0, 1) for x in grads)
        return Gradients.of_all_keys(grad_query, grad_key, grad_value, start)

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, logsumexp, _, rng_state = self._package._flash_attn_varlen_forward(
            query, key, value, *lengths, **_common(scale, dropout), return_softmax=False
        )
        return output, (logsumexp, rng_state)

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
        logsumexp, rng_state = saved
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        self._package._flash_attn_varlen_backward(
            grad_output,
            query,
            key,
            value,
            output,
            logsumexp,
            *grads,
            *lengths,
            **_common(scale, dropout),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=rng_state,
        )
        return grads


def _common(scale: float, dropout: float) -> dict:
    """What forward and backward are told alike; the causal mask is aligned bottom-right."""
    return {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
