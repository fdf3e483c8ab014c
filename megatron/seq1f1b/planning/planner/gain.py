"""What segments gain over the strongest opponent: Megatron's own schedules with all that they have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gain:
    """The seconds of the fastest step of this package and of Megatron's own schedules; None where nothing fits.

    `error` is the relative error of such predictions.
    """

    ours: float | None
    megatron: float | None
    error: float

    @property
    def value(self) -> float | None:
        """How much more throughput, relative; None unless both fit."""
        return None if self.ours is None or self.megatron is None else self.megatron / self.ours - 1

    @property
    def is_of_segments(self) -> bool:
        """Whether segments are worth having: only they fit, or they gain more than the error."""
        return self.megatron is None if self.value is None else self.value >= self.error

    def __str__(self) -> str:
        if self.value is None:
            only = "only segments fit" if self.ours else "only Megatron's own fit"
            return only if self.ours or self.megatron else "nothing fits"
        return f"{100 * self.value:+.1f} %{' (within error)' * (abs(self.value) < self.error)}"
