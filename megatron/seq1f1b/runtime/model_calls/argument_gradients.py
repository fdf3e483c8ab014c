"""Gradients of arguments of the model that the program computed, such as embeddings of images.

Tested in functional_tests/test_programs.py by test_a_program_trains_as_with_whole_sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class ArgumentGradients:
    """The gradients of the arguments of one call, summed over its segments.

    The graph behind an argument is the program's, and goes backward once, but each segment has a backward of its own.
    So the model gets `leaves`, which end the graphs of the segments, and `go_backward` takes the sums from there into
    the program.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        self._arguments = arguments
        self.leaves = [argument.detach().requires_grad_() for argument in arguments]

    def go_backward(self) -> None:
        """Run the program's part of the backward. Call it once, after the backwards of all segments."""
        arguments = []
        gradients = []
        for argument, leaf in zip(self._arguments, self.leaves, strict=True):
            if leaf.grad is not None:  # None if no segment's output depends on it
                arguments.append(argument)
                gradients.append(leaf.grad)
        if arguments:
            torch.autograd.backward(arguments, gradients)
