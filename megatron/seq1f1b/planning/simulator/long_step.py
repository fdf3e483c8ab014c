"""A predicted step of many micro-batches, from two short ones that end alike."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from ...schedule import Schedule
from ..costs.machine import Machine
from ..costs.training_setup import TrainingSetup
from .step import predict

# Groups of micro-batches after which the steady state is reached.
_SHORT_STEP = 3


@dataclass(frozen=True)
class LongStep:
    """Seconds of the step, and bytes of the fullest rank."""

    seconds: float
    memory: float


def predict_long(
    setup: TrainingSetup, machine: Machine, schedule_of: Callable[[TrainingSetup], Schedule] | None = None
) -> LongStep:
    """In its steady state a schedule repeats itself with every group of micro-batches that occupies all ranks, so that
    time, and memory where it grows at all, grow by as much with each. Raises ValueError for what cannot run."""
    group = ceil(setup.pipeline_parallel / len(setup.segments))
    short = _SHORT_STEP * group + setup.num_microbatches % group
    if setup.num_microbatches <= short + group:
        return _predicted(setup, machine, schedule_of)
    base, longer = (
        _predicted(replace(setup, num_microbatches=count), machine, schedule_of) for count in (short, short + group)
    )
    more = (setup.num_microbatches - short) // group
    return LongStep(
        base.seconds + more * (longer.seconds - base.seconds), base.memory + more * (longer.memory - base.memory)
    )


def _predicted(
    setup: TrainingSetup, machine: Machine, schedule_of: Callable[[TrainingSetup], Schedule] | None
) -> LongStep:
    found = predict(setup, machine, schedule_of and schedule_of(setup))
    return LongStep(found.seconds, max(memory.total for memory in found.memory))
