"""A training step predicted: the lowered schedule in simulated time, then gradients, optimizer and parameters."""

from dataclasses import dataclass
from functools import singledispatch

from ...schedule import Costs, Schedule, Timeline, build, lower, simulate
from ..costs.machine import GIB, Machine
from ..costs.stage_times import StepEnd, replica_times, step_costs, step_end
from ..costs.step_memory import Memory, rank_memory
from ..costs.training_setup import TrainingSetup
from .lowered import ChunkCollectives, compute_only, execute_lowered


@dataclass(frozen=True)
class Prediction:
    """`timeline` is that of the schedule, `seconds` the time of the whole iteration."""

    setup: TrainingSetup
    machine: Machine
    timeline: Timeline
    ends: tuple[StepEnd, ...]
    seconds: float
    memory: tuple[Memory, ...]

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.setup.global_batch_size * self.setup.sequence_length / self.seconds

    @property
    def bubble(self) -> float:
        """Idle time over total time, from the first forward to the last backward of any rank."""
        return compute_only(self.timeline).bubble_ratio

    @property
    def fits(self) -> bool:
        return max(memory.total for memory in self.memory) <= self.machine.device.memory_gib * GIB


def predict(setup: TrainingSetup, machine: Machine, schedule: Schedule | None = None) -> Prediction:
    """`schedule` is built from `setup.family` if it is not given. Raises ValueError for what cannot run."""
    costs = step_costs(setup, machine)
    schedule = schedule or build(setup.family, setup.shape, costs)
    timeline = timeline_of(setup, machine, schedule, costs)
    timeline = Timeline(timeline.shape, timeline.ranks, "s", {"schedule": setup.family})
    ends = tuple(step_end(setup, machine, rank) for rank in range(setup.pipeline_parallel))
    seconds = _seconds(timeline, ends, machine)
    memory = tuple(rank_memory(setup, schedule, rank) for rank in range(setup.pipeline_parallel))
    return Prediction(setup, machine, timeline, ends, seconds, memory)


@singledispatch
def timeline_of(setup: TrainingSetup, machine: Machine, schedule: Schedule, costs: Costs) -> Timeline:
    """The actions of a schedule in time, with messages as the interpreter sends them."""
    return execute_lowered(lower(schedule), costs, chunk_collectives(setup, machine))


def shortest(setup: TrainingSetup, machine: Machine, schedule: Schedule) -> float:
    """A lower bound on the `seconds` of `predict`, found sooner: messages do not wait for each other, and replicas
    exchange nothing beside compute."""
    ends = tuple(step_end(setup, machine, rank) for rank in range(setup.pipeline_parallel))
    return _seconds(simulate(schedule, step_costs(setup, machine)), ends, machine)


def chunk_collectives(setup: TrainingSetup, machine: Machine) -> ChunkCollectives | None:
    """None where replicas exchange gradients and parameters outside the schedule."""
    if not setup.overlaps_data_parallel or setup.data_group.size == 1:
        return None
    stages = range(setup.placement.num_stages)
    times = (
        replica_times(setup, machine, setup.stage_parameters(each), setup.stage_expert_parameters(each))
        for each in stages
    )
    reduce, gather = zip(*times, strict=True)
    return ChunkCollectives(gather, reduce)


def _seconds(timeline: Timeline, ends: tuple[StepEnd, ...], machine: Machine) -> float:
    """Seconds of the whole step: the schedule and what follows it."""
    through = (max(span.end for span in spans) for spans in timeline.ranks)
    reduced = max(now + end.reduce for now, end in zip(through, ends, strict=True))
    return reduced + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step
