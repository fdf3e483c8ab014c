"""What the interpreter asks of forwards.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from typing import Any, Protocol

from torch import Tensor

from ...model import Segment


class Forwards(Protocol):
    """Runs the forwards of a step, on whole micro-batches or on segments, and holds what their backwards need of the
    program."""

    def forward(self, stage: int, segment: Segment, input_tensor: Tensor | None, moves: bool) -> Tensor:
        """The output of a stage for a segment; on the last stage, a scalar that the backward starts from.

        `input_tensor` [rows, b, h] is the output of the stage before, in the shape of `message_shape`; None on the
        first stage. If the unit `moves`, what its forward saves may go to the memory of the host.
        """

    def loss_gradient(self, output: Tensor, segment: Segment) -> Any:
        """The gradient of what `forward` returned on the last stage; None if a loss goes backward by itself."""

    def end_backward(self, stage: int, segment: Segment) -> None:
        """Called behind the backward of a segment on a stage."""

    def assert_empty(self) -> None:
        """Called at the end of a step: fails if something of it is left."""
