"""What a layer carries from segment to segment of a micro-batch: keys and values, latents, recurrent states, counts.

Tested in test_contributing.py by test_the_new_layer_carries_its_state_over_segments.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class Carried:
    """State of one layer for one micro-batch.

    `SegmentContext.carried` makes it in the forward of the first segment, later segments find it, and their backwards,
    in reverse, take gradients from it. It ends with the backward of the first segment, or with the last forward if no
    backward follows. The context tells it what it has to know; memory of the host and rehearsals ask what it holds.
    """

    def tensors(self) -> Iterable[Tensor]:
        """All tensors that it holds now."""
        raise NotImplementedError

    def end_forward(self, has_graph: bool, has_backward: bool) -> None:
        """A segment has gone forward: forget what nothing reads again. `has_backward`: its backward will come;
        `has_graph`: that backward starts from this forward, and not from a repeated one."""

    def to_host(self, keep: Callable[[Tensor], Any]) -> None:
        """All segments have gone forward: replace tensors by what `keep` returns, see HostMemory, until a backward
        reads them."""
