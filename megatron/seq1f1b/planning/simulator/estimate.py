"""Time, bubble and activations of a step of any number of micro-batches, from short steps where there are many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isclose
from statistics import fmean

from ...schedule import Costs, Schedule, peak_memory, simulate

# Up to so many units of all stages together a step is simulated as it is, in a tenth of a second.
_FEW_UNITS = 40_000
# Groups of micro-batches after which the steady state is usually reached.
_SHORT_STEP = 6
# Relative difference of times that are as good as equal.
_EQUAL = 1e-5


@dataclass(frozen=True)
class StepEstimate:
    """`seconds` is the makespan, in the time unit of the costs, `busy` the mean over ranks of the time in actions.

    `activations` holds the peak of each rank, in the unit of `costs.activation`.
    """

    seconds: float
    busy: float
    activations: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle time over total time."""
        return 1 - self.busy / self.seconds if self.seconds else 0.0


def estimate_step(schedule_of: Callable[[int], Schedule], num_microbatches: int, costs: Costs) -> StepEstimate:
    """Simulate `schedule_of(num_microbatches)`; if it is very long, estimate it from short steps, to within 1 %.

    Raises ValueError if the costs do not fit the schedule.
    """

    def simulated(count: int) -> tuple[float, ...]:
        schedule = schedule_of(count)
        timeline = simulate(schedule, costs)
        busy = fmean(map(timeline.busy, range(schedule.shape.num_ranks)))
        return timeline.makespan, busy, *peak_memory(schedule, costs)

    first = schedule_of(1).shape
    if num_microbatches * first.num_stages * first.num_segments <= _FEW_UNITS:
        seconds, busy, *activations = simulated(num_microbatches)
    else:
        group = ceil(first.num_ranks / first.num_segments)
        seconds, busy, *activations = from_short_steps(simulated, num_microbatches, group)
    return StepEstimate(seconds, busy, tuple(activations))


def from_short_steps(measured: Callable[[int], Sequence[float]], num_microbatches: int, group: int) -> Sequence[float]:
    """What `measured` gives for a step of so many micro-batches, from short steps that end alike.

    In its steady state a schedule repeats itself with every group of micro-batches that occupies all ranks, so that
    time, and memory where it grows at all, grow by as much with each. Two steps give that growth; where it does not
    lead to a third one, twice as long, that state comes later, and longer steps are taken.
    """
    groups, rest = divmod(num_microbatches, group)
    short = _SHORT_STEP
    while groups > 2 * short:
        first, second, third = (measured(count * group + rest) for count in (short, short + 1, 2 * short))
        growth = [b - a for a, b in zip(first, second, strict=True)]
        if all(isclose(a + short * each, b, rel_tol=_EQUAL) for a, b, each in zip(first, third, growth, strict=True)):
            return [value + (groups - 2 * short) * each for value, each in zip(third, growth, strict=True)]
        short *= 2
    return measured(num_microbatches)
