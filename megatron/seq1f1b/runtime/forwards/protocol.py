"""What the interpreter asks of forwards.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from typing import Any, Protocol

from torch import Tensor

from ...model import Segment


class Forwards(Protocol):
    """Runs the forwards of a step, on whole micro-batches or on segments, and holds what their backwards need of the
    program."""

    def forward(self, stage: int, segment: Segment, arrived: Tensor | None, moves: bool) -> Tensor:
        """The output of a stage for a segment whose input has `arrived`, None on the first stage; on the last stage, a
        scalar that the backward starts from. If it `moves`, what it saves may go to the memory of the host."""

    def loss_gradient(self, output: Tensor, segment: Segment) -> Any:
        """The gradient of what `forward` returned on the last stage; None if a loss goes backward by itself."""

    def end_backward(self, stage: int, segment: Segment) -> None:
        """Called behind the backward of a segment on a stage."""

    def assert_empty(self) -> None:
        """Called at the end of a step: fails if something of it is left."""
