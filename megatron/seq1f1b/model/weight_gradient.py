"""Weight gradients of linear layers, computed apart from the backward that gives the input gradients.

The backward of a linear layer has two independent halves: the input gradient, for which the previous stage waits, and
the weight gradient, which is not needed before the end of the step. Zero-bubble schedules (arXiv 2401.10241, section 2)
run the second where a rank would be idle.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Gives the gradients of parameters; None for one means that its gradient is already complete, for instance because it
# was added to `main_grad`.
Product = Callable[[], Sequence[Tensor | None]]


class WeightGradientStore:
    """The weight gradients that are still to be computed, by the unit whose backward left them.

    Holds inputs and output gradients of the unit's linear layers: b·n·(i + o)·e bytes for n tokens, b sequences, i and
    o features, e bytes an element.
    """

    def __init__(self) -> None:
        self._left: dict[Hashable, deque[tuple[Sequence[torch.nn.Parameter], Product]]] = {}
        self._collecting: deque | None = None

    @contextmanager
    def collecting(self, unit: Hashable) -> Iterator[None]:
        """What is left inside belongs to `unit`."""
        self._collecting = self._left.setdefault(unit, deque())
        try:
            yield
        finally:
            self._collecting = None

    def leave(self, parameters: Sequence[torch.nn.Parameter], product: Product) -> None:
        """Keep the product that gives the gradients of `parameters` for the unit whose backward runs."""
        assert self._collecting is not None, "a split backward ran outside of a schedule"
        self._collecting.append((parameters, product))

    def compute(self, unit: Hashable) -> None:
        """Compute what was left for `unit`, freeing it one by one.

        Like all gradients these reach the parameters' hooks through autograd, where Megatron's DistributedDataParallel
        collects them.
        """
        left = self._left.pop(unit)
        while left:
            parameters, product = left.popleft()
            _WeightGradient.apply(product, *parameters).backward()

    def clear(self) -> None:
        """Forget everything, after a step that failed."""
        self._left.clear()

    def assert_empty(self) -> None:
        """No weight gradient is forgotten, no activation outlives a step."""
        assert not self._left, f"the weight gradients of {len(self._left)} units outlived the step"


class _WeightGradient(torch.autograd.Function):
    """A scalar whose backward gives the gradients of parameters, which may keep what it gives, uncopied."""

    @staticmethod
    def forward(ctx: Any, product: Product, *parameters: torch.nn.Parameter) -> Tensor:
        ctx.product = product
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        product = ctx.product
        del ctx.product
        return None, *product()


def accumulated(weight: torch.nn.Parameter) -> Tensor | None:
    """The gradient that autograd passes to the hooks of a weight whose gradient was added to its `main_grad`.

    `grad_added_to_main_grad` keeps DistributedDataParallel from adding it again. Where another layer gives the same
    weight a gradient the ordinary way (`zero_out_wgrad`: tied embeddings) it is added after all, so it has to be zero.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
