"""What segments gain over Megatron's own schedules, within the error of predictions.

Tested in commands/test_plan.py.
"""

from typing import NamedTuple


def longest_that_gains(seconds: float, error: float) -> float:
    """Below so many seconds a step gains more than the error over one of `seconds`: see `Gain.is_of_segments`."""
    return seconds / (1 + error)


class Gain(NamedTuple):
    """The gain of segments over Megatron's own schedules: tokens/s of the fastest step of either, None where nothing
    fits, and the relative error of such predictions."""

    ours: float | None
    megatron: float | None
    error: float

    @property
    def value(self) -> float | None:
        """How much more throughput, relative; None unless both fit."""
        return None if self.ours is None or self.megatron is None else self.ours / self.megatron - 1

    @property
    def is_of_segments(self) -> bool:
        """Whether only segments fit, or gain more than the error."""
        return self.megatron is None if self.value is None else self.value >= self.error

    @property
    def is_within_error(self) -> bool:
        """Whether both fit, and differ by less than the error."""
        return self.value is not None and abs(self.value) < self.error

    @property
    def percent(self) -> str:
        """The value in words, or what fits; without the error."""
        if self.value is None:
            only = "only segments fit" if self.ours else "only Megatron's own fit"
            return only if self.ours or self.megatron else "nothing fits"
        return f"{100 * self.value:+.1f} %"

    def __str__(self) -> str:
        return f"{self.percent} (within error)" if self.is_within_error else self.percent
