"""A training step predicted: the schedule on simulated channels, then gradients, optimizer and parameters."""

from dataclasses import dataclass

from ..costs.machine import Machine
from ..costs.memory import GIB, Memory, rank_memory
from ..costs.stage_times import StepEnd, step_costs, step_end
from ..costs.training_setup import TrainingSetup
from ..schedule import Schedule, Timeline, build, simulate
from .blocking import execute_blocking


@dataclass(frozen=True)
class Prediction:
    """`pipeline` is the time of the schedule, `seconds` that of the whole iteration."""

    setup: TrainingSetup
    machine: Machine
    timeline: Timeline
    ends: tuple[StepEnd, ...]
    seconds: float
    memory: tuple[Memory, ...]

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.setup.global_batch_size * self.setup.sequence_length / self.seconds

    @property
    def bubble(self) -> float:
        return self.timeline.bubble_ratio

    @property
    def fits(self) -> bool:
        return max(memory.total for memory in self.memory) <= self.machine.device.memory_gib * GIB


def predict(setup: TrainingSetup, machine: Machine, schedule: Schedule | None = None) -> Prediction:
    """`schedule` is built from `setup.family` if it is not given. Raises ValueError for what cannot run."""
    costs = step_costs(setup, machine)
    schedule = schedule or build(setup.family, setup.shape, costs)
    if setup.software.overlaps_messages or setup.pipeline_parallel == 1:
        timeline = simulate(schedule, costs)
    else:
        timeline = execute_blocking(schedule, costs)
    timeline = Timeline(timeline.shape, timeline.ranks, "s", {"schedule": setup.family})
    ends = tuple(step_end(setup, machine, rank) for rank in range(setup.pipeline_parallel))
    reduced = max(spans[-1].end + end.reduce for spans, end in zip(timeline.ranks, ends, strict=True))
    seconds = reduced + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step
    memory = tuple(rank_memory(setup, schedule, rank) for rank in range(setup.pipeline_parallel))
    return Prediction(setup, machine, timeline, ends, seconds, memory)
