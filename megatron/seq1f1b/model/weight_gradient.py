"""Weight gradients of linear layers, computed apart from the backward that gives the input gradients.

The backward of a linear layer has two independent halves: the input gradient, which the previous stage needs, and the
weight gradient, which the end of the step needs. Zero-bubble schedules (arXiv 2401.10241, section 2) run the second
half when a rank would be idle.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Gives the gradients of parameters, None for one whose gradient is already in `main_grad`.
Product = Callable[[], Sequence[Tensor | None]]


class WeightGradientStore:
    """The weight gradients still to be computed, by the unit whose backward left them.

    It holds inputs and output gradients of the unit's linear layers: b·n·(i + o)·e bytes for n tokens, b sequences, i
    and o features, e bytes an element.
    """

    def __init__(self) -> None:
        self._left: dict[Hashable, deque[tuple[Sequence[torch.nn.Parameter], Product]]] = {}
        self._collecting: deque | None = None

    @contextmanager
    def collecting(self, unit: Hashable) -> Iterator[None]:
        """Inside, the backward of `unit` runs."""
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
        """Compute the weight gradients of `unit`, and free each product.

        They reach the parameters' hooks, and so Megatron's DistributedDataParallel, through autograd.
        """
        left = self._left.pop(unit)
        while left:
            parameters, product = left.popleft()
            _WeightGradient.apply(product, *parameters).backward()

    def clear(self) -> None:
        """Forget everything, after a step that failed."""
        self._left.clear()

    def assert_empty(self) -> None:
        assert not self._left, f"the weight gradients of {len(self._left)} units outlived the step"


class _WeightGradient(torch.autograd.Function):
    """A scalar whose backward gives the gradients of parameters; autograd need not copy them."""

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
    """The gradient for the hooks of a weight whose gradient was added to its `main_grad`.

    `grad_added_to_main_grad` keeps DistributedDataParallel from adding it again. If another layer gives the same weight
    an ordinary gradient (`zero_out_wgrad`: tied embeddings), this one is added, too, so it has to be zero.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
