"""The kernels of the package flash-attn, version 2.7 and later (arXiv 2307.08691)."""

import torch
from torch import Tensor

from .interface import AttentionRule, CumulativeLengths, Gradients, Saved


class FlashAttention2:
    """bf16 and fp16; heads of one size, a multiple of 8 up to 256; grouped KV heads; dropout."""

    def __init__(self, rule: AttentionRule) -> None:
        from flash_attn import flash_attn_interface

        self._package = flash_attn_interface
        # What forward and backward are given alike; the causal mask is aligned bottom-right.
        self._common = {
            "dropout_p": rule.dropout,
            "softmax_scale": rule.scale,
            "causal": True,
            "window_size_left": -1 if rule.window is None else rule.window,
            "window_size_right": -1 if rule.window is None else 0,
            "softcap": 0.0,
            "alibi_slopes": None,
        }

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, logsumexp, _, rng_state = self._package._flash_attn_forward(
            *(x.transpose(0, 1) for x in (query, key, value)), **self._common, return_softmax=False
        )
        return output.transpose(0, 1).flatten(2).contiguous(), (logsumexp, rng_state)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        logsumexp, rng_state = saved.statistics
        q, k, v = (x.transpose(0, 1) for x in saved[:3])
        grads = [torch.empty_like(x) for x in (q, k, v)]
        self._package._flash_attn_backward(
            grad_output.reshape(saved.query.shape).transpose(0, 1),
            q,
            k,
            v,
            saved.output.reshape(saved.query.shape).transpose(0, 1),
            logsumexp,
            *grads,
            **self._common,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=rng_state,
        )
        return Gradients.of_all_keys(*(x.transpose(0, 1) for x in grads))

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, logsumexp, _, rng_state = self._package._flash_attn_varlen_forward(
            query, key, value, *lengths, **self._common, return_softmax=False
        )
        return output, (logsumexp, rng_state)

    def backward_packed(
        self, grad_output: Tensor, saved: Saved, lengths: CumulativeLengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, (logsumexp, rng_state) = saved
        grads = tuple(torch.empty_like(x) for x in saved[:3])
        self._package._flash_attn_varlen_backward(
            grad_output,
            *tensors,
            logsumexp,
            *grads,
            *lengths,
            **self._common,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=rng_state,
        )
        return grads
