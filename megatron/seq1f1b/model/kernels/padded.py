"""Head sizes that a kernel does not take by itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class Padded:
    """Runs `kernel` on heads of one size, a multiple of `multiple_of`, by filling up with zeros.

    Serves multi-latent attention, whose values have smaller heads than its queries, and odd sizes. Zeros change neither
    scores nor what is kept of the output. The padded copies live for the call only.
    """

    kernel: Kernel
    multiple_of: int = 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        size = self._size(query, value)
        output, statistics = self.kernel.forward(*(_pad(x, size) for x in (query, key, value)))
        heads = output.view(*query.shape[:3], size)
        return heads[..., : value.shape[3]].flatten(2).contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        size = self._size(query, value)
        grad_output, output = (
            _pad(x.unflatten(2, (-1, value.shape[3])), size).flatten(2) for x in (grad_output, output)
        )
        padded = Saved(*(_pad(x, size) for x in (query, key, value)), output, statistics)
        grads = self.kernel.backward(grad_output, padded)

        def own_sizes(grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
            return grad_key[..., : key.shape[3]], grad_value[..., : value.shape[3]]

        prefix = own_sizes(*grads.prefix) if grads.prefix is not None else None
        return Gradients(grads.query[..., : query.shape[3]], *own_sizes(grads.key, grads.value), prefix)

    def _size(self, query: Tensor, value: Tensor) -> int:
        largest = max(query.shape[3], value.shape[3])
        return -(-largest // self.multiple_of) * self.multiple_of


def _pad(x: Tensor, size: int) -> Tensor:
    """[..., d] to [..., size]; `x` itself if it has that size, where `pad` would copy it."""
    missing = size - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
