"""Time, bubble and activations of a step of any number of micro-batches, from short steps where there are many."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from ...schedule import Costs, Schedule, peak_memory, simulate

# Up to so many units of all stages together, a step is simulated as it is.
_FEW_UNITS = 5_000
# Groups of micro-batches after which the steady state is reached.
_SHORT_STEP = 4


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
    """Simulate `schedule_of(num_microbatches)`; if it is long, two short steps that end alike.

    In its steady state a schedule repeats itself with every group of micro-batches that occupies all ranks, so that
    time and memory grow by as much with each. Raises ValueError if the costs do not fit the schedule.
    """
    first = schedule_of(1).shape
    group = ceil(first.num_ranks / first.num_segments)
    short = _SHORT_STEP * group + num_microbatches % group
    if num_microbatches <= short + group or num_microbatches * first.num_stages * first.num_segments <= _FEW_UNITS:
        return _simulated(schedule_of(num_microbatches), costs)
    base, longer = (_simulated(schedule_of(count), costs) for count in (short, short + group))
    more = (num_microbatches - short) // group

    def grown(a: float, b: float) -> float:
        return a + more * (b - a)

    return StepEstimate(
        grown(base.seconds, longer.seconds),
        grown(base.busy, longer.busy),
        tuple(map(grown, base.activations, longer.activations)),
    )


def _simulated(schedule: Schedule, costs: Costs) -> StepEstimate:
    timeline = simulate(schedule, costs)
    ranks = range(schedule.shape.num_ranks)
    busy = sum(map(timeline.busy, ranks)) / len(ranks)
    return StepEstimate(timeline.makespan, busy, tuple(peak_memory(schedule, costs)))
