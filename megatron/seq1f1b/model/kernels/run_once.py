"""Kernels of layers that are recomputed, without a second run.

Tested in model/test_segment_attention.py by test_recomputed_gradients_are_bitwise_equal.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..memory.storages import tensor_of
from ..segment import KeptAttention
from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class RunOnce:
    """Runs `kernel` once where full recomputation repeats the forward of a layer's `unit`.

    The first forward, without autograd, leaves what `keep` makes of output and statistics in `kept`; the repeated one
    takes them, so that the graph does not keep itself alive. A forward without autograd between them, of a module that
    is recomputed within another, only reads them. In between a layer keeps b·n·h·(e·w + 4) bytes, for n tokens of b
    sequences, h query heads, values of size e and w bytes an element. The state of the random `generator` after the
    first forward is restored for the rest of the layer; it is None if the kernel draws nothing. `is_recorded` tells the
    repeated forward, which autograd records, from the first one and those between.
    """

    kernel: Kernel
    kept: KeptAttention
    keep: Callable[[Tensor], Any]
    unit: Hashable
    generator: torch.Generator | None
    is_recorded: bool = field(default_factory=torch.is_grad_enabled)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.unit in self.kept:
            results, state = self.kept[self.unit]
            if self.is_recorded:
                del self.kept[self.unit]
            if self.generator is not None and state is not None:
                self.generator.set_state(state)
            first_output, *first_statistics = map(tensor_of, results)
            return first_output, tuple(first_statistics)
        output, statistics = self.kernel.forward(query, key, value)
        if not self.is_recorded:
            state = None if self.generator is None else self.generator.get_state()
            self.kept[self.unit] = [self.keep(x) for x in (output, *statistics)], state
        return output, statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        return self.kernel.backward(grad_output, saved)
