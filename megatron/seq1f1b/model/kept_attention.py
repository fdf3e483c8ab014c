"""Full recomputation without attention's: the output and the log-sum-exp that a first forward left serve the repeated
one.

A repeated forward needs them for its backward, and nothing else that the kernel computes; keys and values are in the
cache. For n tokens of b sequences, with h query heads, values of size e and w bytes an element, a layer keeps
b·n·h·(e·w + 4) bytes from the first forward of a unit to the repeated one.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import Gradients, Kernel, Saved


class _Result(NamedTuple):
    output: Tensor
    statistics: tuple[Tensor, ...]
    # Of the generator that masks of dropout were drawn from, which the rest of the layer draws from, too.
    random_state: Tensor | None


class KeptAttention:
    """What the kernels of attention returned in first forwards, by layer and unit."""

    def __init__(self) -> None:
        self._results: dict[Hashable, _Result] = {}

    def around(self, kernel: Kernel, unit: Hashable, generator: torch.Generator | None) -> Kernel:
        """`kernel` for the forward of `unit` that is about to run: the first, which autograd does not record, the
        repeated one, or the only one.

        `generator` is the one that the kernel draws from, None if it draws nothing.
        """
        is_repeated = unit in self._results
        assert torch.is_grad_enabled() or not is_repeated, "attention of a unit went forward twice before its backward"
        if torch.is_grad_enabled() and not is_repeated:
            return kernel
        return _Kept(kernel, generator, self._results, unit)

    def clear(self) -> None:
        """Forget everything, after a step that failed."""
        self._results.clear()

    def assert_empty(self) -> None:
        """Nothing is kept that no forward was repeated for."""
        assert not self._results, f"the attention of {len(self._results)} forwards was kept and not used"


@dataclass(frozen=True)
class _Kept:
    """Runs `kernel` in a first forward, which leaves a result; a repeated one takes it, lest the graph keep itself."""

    kernel: Kernel
    generator: torch.Generator | None
    results: dict[Hashable, _Result]
    unit: Hashable

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.unit in self.results:
            output, statistics, state = self.results.pop(self.unit)
            if self.generator is not None:
                self.generator.set_state(state)
            return output, statistics
        output, statistics = self.kernel.forward(query, key, value)
        state = None if self.generator is None else self.generator.get_state()
        self.results[self.unit] = _Result(output, statistics, state)
        return output, statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        return self.kernel.backward(grad_output, saved)
