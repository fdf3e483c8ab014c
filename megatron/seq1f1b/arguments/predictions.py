"""What the core takes of costs: an object of this form is passed to what makes the configuration."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..partition import SegmentTime
from ..schedule import Costs, ScheduleChoice


class Predictions(Protocol):
    """What the segments and steps of one run cost; every method raises ValueError where this is not known."""

    @property
    def is_measured(self) -> bool:
        """Whether the times come from --sequence-split-profile."""

    @property
    def full_speed_rows(self) -> int:
        """The fewest tokens of a segment at which kernels run at full speed."""

    @property
    def flops(self) -> tuple[int, int] | None:
        """FLOPs of a token and of a pair of tokens by the formula of the authors of Seq1F1B; None for unknown sizes."""

    def time(self, of_any_length: bool = False) -> SegmentTime:
        """Seconds of a segment on the slowest stage. A trace does not have the times `of_any_length`."""

    def of_actions(self, lengths: Sequence[int]) -> Costs:
        """The costs of the actions on segments of `lengths` tokens, for which `auto` plans."""

    def least_offload(self, schedule: ScheduleChoice, lengths: Sequence[int]) -> float:
        """The least share of the activations, in sixteenths, without which a step fits the device; 1 if none does."""

    def best_num_segments(self, schedule: ScheduleChoice, cut: Callable[[int], tuple[int, ...]]) -> int:
        """The number of segments of the shortest step that fits the device; `cut(number)` gives their lengths."""
