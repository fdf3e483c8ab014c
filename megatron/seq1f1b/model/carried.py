"""What a layer carries from segment to segment of a micro-batch: keys and values, latents, recurrent states, counts.

Tested in test_contributing.py by test_the_new_layer_carries_its_state_over_segments.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class Carried:
    """State of one layer for one micro-batch.

    `SegmentContext.carried` makes it in the forward of the first segment, and finds it for later ones; their backwards,
    in reverse, take gradients from it. It is dropped after the backward of the first segment, or after the last forward
    if no backward follows. The context calls the methods below; host memory and rehearsals read `tensors`.
    """

    def tensors(self) -> Iterable[Tensor]:
        """All tensors that it holds now."""
        raise NotImplementedError

    def end_forward(self, has_graph: bool, has_backward: bool) -> None:
        """Called when a segment has gone forward: forget what nothing reads again. It `has_backward` if a backward will
        come, and `has_graph` if that starts from this forward, not from a repeated one."""

    def to_host(self, keep: Callable[[Tensor], Any]) -> None:
        """Called when all segments have gone forward: replace tensors by what `keep` returns, see HostMemory, until a
        backward reads them."""
