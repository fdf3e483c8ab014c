"""Kernels for other head sizes than they take.

Tested in model/test_kernels.py.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class Padded:
    """Brings heads to one size, a multiple of `multiple_of`: the smaller value heads of multi-latent attention, and odd
    sizes. Zeros are put before the numbers of each head, in copies that live for the call only.

    Values need no copy if they have other numbers before them in memory, such as the keys of the same head: the kernel
    takes those for a part of the values, too. They change only numbers of the output that are dropped, and get no
    gradient, since that of the output is zero there. They have to be finite, and to begin at a multiple of
    `multiple_of`, as kernels read several numbers at once.
    """

    kernel: Kernel
    multiple_of: int = 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        size = self._size(query, value)
        output, statistics = self.kernel.forward(_padded(query, size), _padded(key, size), self._widened(value, size))
        return output[..., size - value.shape[3] :].contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        size = self._size(saved.query, saved.value)
        of_one_size = Saved(
            query=_padded(saved.query, size),
            key=_padded(saved.key, size),
            value=self._widened(saved.value, size),
            output=_padded(saved.output, size),
            statistics=saved.statistics,
        )
        grads = self.kernel.backward(_padded(grad_output, size), of_one_size)
        return Gradients(
            query=_without_padding(grads.query, saved.query),
            key=_without_padding(grads.key, saved.key),
            value=_without_padding(grads.value, saved.value),
        )

    def _size(self, query: Tensor, value: Tensor) -> int:
        """The size of all heads within the kernel."""
        largest = max(query.shape[3], value.shape[3])
        return ceil(largest / self.multiple_of) * self.multiple_of

    def takes_values_beside_keys(self, size: int, value_size: int) -> bool:
        """Whether values that follow the keys of their head in memory need no copy."""
        return value_size < size and not size % self.multiple_of and not value_size % self.multiple_of

    def _widened(self, value: Tensor, size: int) -> Tensor:
        """The values [m, b, g, e] with what lies before each head, or with zeros if heads lie too close together."""
        missing = size - value.shape[3]
        if not missing:
            return value
        start = value.storage_offset() - missing
        # From one head to the next in memory; a dimension of one element takes no steps.
        steps = [stride for stride, number in zip(value.stride()[:3], value.shape[:3], strict=True) if number > 1]
        has_room = value.stride(3) == 1 and start >= 0 and all(step >= size for step in steps)
        is_aligned = all(place % self.multiple_of == 0 for place in (start, *steps))
        if has_room and is_aligned:
            return value.as_strided((*value.shape[:3], size), value.stride(), start)
        return _padded(value, size)


def _padded(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[3]
    return torch.nn.functional.pad(x, (missing, 0)) if missing else x


def _without_padding(grad: Tensor, of: Tensor) -> Tensor:
    """The gradient of a tensor `of`, from that of its padded copy, which may be of its last tokens only."""
    return grad[..., grad.shape[3] - of.shape[3] :]
