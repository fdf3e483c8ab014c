"""Gradients of arguments of the model that the program computed, such as embeddings of images.

Tested in functional_tests/test_programs.py by test_a_program_trains_as_with_whole_sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor


class ArgumentGradients:
    """The gradients of the arguments of one call, summed over its segments; `arguments` are those with one, by place.

    The graph behind an argument is the program's, and goes backward once, but each segment has a backward of its own.
    So the model gets tensors that end the graphs of the segments, and `go_backward` takes the sums from there into the
    program.
    """

    def __init__(self, arguments: Mapping[int, Tensor]) -> None:
        self._arguments = arguments
        self._ends = {place: argument.detach().requires_grad_() for place, argument in arguments.items()}

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> Self | None:
        """Those of a call with these arguments; None if none of them has a gradient."""
        with_gradient = {
            place: argument
            for place, argument in enumerate(arguments)
            if isinstance(argument, Tensor) and argument.requires_grad
        }
        return cls(with_gradient) if with_gradient else None

    def with_ends(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of the call, with the ends of graphs in the place of those that have a gradient."""
        return [self._ends.get(place, argument) for place, argument in enumerate(arguments)]

    def go_backward(self) -> None:
        """Run the program's part of the backward. Call it once, after the backwards of all segments."""
        arguments = []
        gradients = []
        for place, end in self._ends.items():
            if end.grad is not None:  # None if no segment's output depends on it
                arguments.append(self._arguments[place])
                gradients.append(end.grad)
        if arguments:
            torch.autograd.backward(arguments, gradients)
