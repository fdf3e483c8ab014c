"""PyTorch's CUDA flash attention operators, which align their causal mask bottom-right: one call per segment."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import AttentionRule, CumulativeLengths, Gradients, Saved

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class CudaFlash:
    """bf16 and fp16; heads of one size, a multiple of 8 up to 256; grouped KV heads without expansion; dropout."""

    rule: AttentionRule

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        lengths = None, None, query.shape[0], key.shape[0]
        output, statistics = self._forward(*(x.transpose(0, 1) for x in (query, key, value)), lengths)
        return output.transpose(0, 1).flatten(2).contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        lengths = None, None, query.shape[0], key.shape[0]
        tensors = grad_output.reshape(query.shape), query, key, value, output.reshape(query.shape)
        grads = self._backward(*(x.transpose(0, 1) for x in tensors), statistics, lengths)
        return Gradients.of_all_keys(*(x.transpose(0, 1) for x in grads))

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._forward(query, key, value, lengths)

    def backward_packed(
        self, grad_output: Tensor, saved: Saved, lengths: CumulativeLengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(grad_output, *saved, lengths)

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple) -> tuple[Tensor, tuple[Tensor, ...]]:
        dropout, scale = self.rule.dropout, self.rule.scale
        # The random state comes as two tensors, of which some versions of PyTorch leave one unused.
        output, logsumexp, *rng_state, _ = _flash(
            query, key, value, *lengths, dropout, True, False, scale=scale, **self._window
        )
        return output, (logsumexp, *rng_state)

    def _backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        statistics: tuple[Tensor, ...],
        lengths: tuple,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logsumexp, *rng_state = statistics
        call = grad_output, query, key, value, output, logsumexp, *lengths, self.rule.dropout, True, *rng_state
        return _flash_backward(*call, scale=self.rule.scale, **self._window)

    @property
    def _window(self) -> dict[str, int]:
        """Keys that a query sees before and after its own token."""
        return {} if self.rule.window is None else {"window_size_left": self.rule.window, "window_size_right": 0}
