"""A training step predicted: the lowered schedule in simulated time (`execution`), then gradients, optimizer and
parameters. Start with `predict`.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache, singledispatch
from itertools import batched, chain, islice
from math import ceil, isclose
from typing import Self

from ..schedule import COMPUTE_KINDS, Kind, Schedule, Shape, build, lower, moved, partition_state
from ..schedule.cost_tables import Costs, Table
from ..schedule.timeline import Timeline
from .execution import execute_lowered
from .host_link import copy_seconds, layers_on_link
from .machine import Machine
from .pair_times import pair_times
from .stage_times import StepEnd, replica_times, step_costs, step_end
from .step_memory import Memory, RankOrder, host_bytes, memory_of_order
from .training_setup import TrainingSetup

_MOST_ACTIONS = 60_000  # longer steps are predicted from short ones
_SHORT_STEP = 6  # groups of micro-batches after which the steady state is usually reached
ERROR_OF_EXTENDED = 0.01  # the largest relative error of a step that is predicted from short ones


@dataclass(frozen=True)
class Prediction:
    """A predicted step; the tuples have an entry for each pipeline rank."""

    setup: TrainingSetup
    machine: Machine
    pipeline: float  # seconds of the schedule
    busy: tuple[float, ...]  # seconds in compute
    ends: tuple[StepEnd, ...]
    seconds: float  # of the whole iteration
    memory: tuple[Memory, ...]
    host_bytes: tuple[float, ...]  # the most in the memory of the host

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.setup.global_batch_size * self.setup.sequence_length / self.seconds

    @property
    def bubble(self) -> float:
        """Idle time over total time, from the first forward to the last backward of any rank."""
        return max(0.0, 1 - sum(self.busy) / (len(self.busy) * self.pipeline))


@dataclass(frozen=True)
class _Step:
    """What a simulated step takes; the tuples have an entry for each rank."""

    seconds: float
    pipeline: float
    busy: tuple[float, ...]
    host_bytes: tuple[float, ...]
    memory: tuple[Memory, ...]

    def numbers(self) -> list[float]:
        """All of it in one list, for `extended`."""
        of_memory = chain(*(astuple(memory) for memory in self.memory))
        return [self.seconds, self.pipeline, *self.busy, *self.host_bytes, *of_memory]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float], num_ranks: int) -> Self:
        """The inverse of `numbers`."""
        left = iter(numbers)
        seconds = next(left)
        pipeline = next(left)
        busy = tuple(islice(left, num_ranks))
        host_bytes = tuple(islice(left, num_ranks))
        memory = tuple(Memory(*of_rank) for of_rank in batched(left, len(fields(Memory))))
        return cls(seconds, pipeline, busy, host_bytes, memory)


def predict(setup: TrainingSetup, machine: Machine, schedule: Schedule | None = None) -> Prediction:
    """The time and the memory of one training step. Without a `schedule` that of `setup.family` runs, and a long step
    is predicted from short ones. Raises ValueError for a step that cannot run."""
    ends = tuple(step_end(setup, machine, rank) for rank in range(setup.pipeline_parallel))

    def predicted(num_microbatches: int) -> _Step:
        short = replace(setup, num_microbatches=num_microbatches)
        costs = step_costs(short, machine)
        share = 0.0 if short.moves_parts else short.offloads
        if schedule:
            actions = moved(schedule, share, short.moves_by_layer)
        else:
            actions = named(short.family, short.shape, share, short.has_pairs, short.moves_by_layer)
        # Where Megatron moves a part of every unit, the order of forwards and backwards is the same.
        in_time = moved(actions, 1.0) if _waits_for_copies(short, machine, costs) else actions
        timeline = timeline_of(short, machine, in_time, costs)
        computing = [span for spans in timeline.ranks for span in spans if span.action.kind in COMPUTE_KINDS]
        pipeline = max(span.end for span in computing) - min(span.start for span in computing)
        last_ends = (max(span.end for span in spans) for spans in timeline.ranks)
        reduced = max(last_end + end.reduce for last_end, end in zip(last_ends, ends, strict=True))
        seconds = reduced + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step
        return _Step(
            seconds=seconds,
            pipeline=pipeline,
            busy=tuple(timeline.busy(rank) for rank in range(short.pipeline_parallel)),
            host_bytes=tuple(host_bytes(short, order, actions.paired) for order in actions.ranks),
            memory=tuple(memory_of_order(short, order) for order in _orders(actions, short.layers_leaving)),
        )

    if schedule:
        step = predicted(setup.num_microbatches)
    else:
        numbers = extended(setup.shape, lambda num_microbatches: predicted(num_microbatches).numbers())
        step = _Step.of_numbers(numbers, setup.pipeline_parallel)
    return Prediction(
        setup=setup,
        machine=machine,
        pipeline=step.pipeline,
        busy=step.busy,
        ends=ends,
        seconds=step.seconds,
        memory=step.memory,
        host_bytes=step.host_bytes,
    )


def check_size(shape: Shape, most_actions: int) -> None:
    """Raise ValueError for a schedule of more actions, which would take minutes to simulate."""
    num_actions = 2 * shape.num_stages * shape.num_units
    if num_actions > most_actions:
        advice = "take fewer micro-batches, which repeat themselves, or fewer segments"
        raise ValueError(f"these sizes make {num_actions:,} actions, the most are {most_actions:,} here; {advice}")


@singledispatch
def timeline_of(setup: TrainingSetup, machine: Machine, schedule: Schedule, costs: Costs) -> Timeline:
    """The actions of a schedule in time, with messages as the interpreter sends them."""
    lowered = _lowered(schedule)
    if setup.partitions_state:
        lowered = replace(lowered, ranks=tuple(tuple(partition_state(actions)) for actions in lowered.ranks))
    stages = range(setup.placement.num_stages)
    side_seconds: dict[Kind, Table] = {}
    if setup.overlaps_data_parallel and setup.data_group.size > 1 and not setup.shards_parameters:
        side_seconds = _replica_seconds(setup, machine, costs)
        if setup.shards_gradients:  # every backward has its own sums
            del side_seconds[Kind.REDUCE]
    if schedule.has_moves:
        if not machine.device.host_bandwidth:
            raise ValueError(f"{machine.name} has no host_bandwidth in [device], which copies to the host take; add it")
        copies = copy_seconds(setup, machine, stages)
        side_seconds[Kind.OFFLOAD] = copies
        if not setup.moves_parts:  # these come back within their backward
            side_seconds[Kind.RELOAD] = copies
    pairs = pair_times(setup, machine) if setup.hides_experts else None
    layers = layers_on_link(setup, stages) if schedule.has_moves else None
    return execute_lowered(lowered, costs, side_seconds, pairs, layers)


def _waits_for_copies(setup: TrainingSetup, machine: Machine, costs: Costs) -> bool:
    """Whether parts of units take longer to their host than forwards, so that one forward right after another waits."""
    if not (setup.moves_parts and setup.offloads):
        return False
    copies = copy_seconds(setup, machine, range(setup.placement.num_stages))
    of_stages = zip(copies, costs.f, strict=True)
    return any(copy > forward for rows in of_stages for copy, forward in zip(*rows, strict=True))


def _replica_seconds(setup: TrainingSetup, machine: Machine, costs: Costs) -> dict[Kind, Table]:
    """Seconds in which replicas reduce gradients and gather parameters, by stage. DistributedDataParallel moves them in
    buckets, some for each layer: a forward waits for the parameters of one layer, and after a backward the
    gradients of one are still to be sent. So the first chunk that a rank gathers, and the last that it reduces,
    move beside their own compute; the others move beside that of other chunks. A partitioned state moves whole
    chunks."""
    reduce = []
    gather = []
    for parameters in setup.parameters:
        of_stage = replica_times(setup, machine, parameters)
        reduce.append(of_stage.reduce)
        gather.append(of_stage.gather)
    if not setup.partitions_state:
        for rank in range(setup.pipeline_parallel):
            stage = setup.placement.stages_of(rank)[0]
            layers = max(1, setup.layers_per_stage[stage])
            # The bucket of one layer has nothing to hide behind; the others, behind the compute of the other layers.
            others = 1 - 1 / layers
            first_forward = costs.f[stage][0]
            last_backward = costs.w[stage][0] + (0.0 if setup.splits_backward else costs.i[stage][0])
            gather[stage] = max(gather[stage] / layers, gather[stage] - others * first_forward)
            reduce[stage] = max(reduce[stage] / layers, reduce[stage] - others * last_backward)
    # A chunk moves once, so the tables have a single column.
    return {Kind.REDUCE: tuple((seconds,) for seconds in reduce), Kind.GATHER: tuple((seconds,) for seconds in gather)}


@lru_cache(maxsize=64)
def named(family: str, shape: Shape, offloads: float = 0.0, pairs: bool = False, by_layer: bool = False) -> Schedule:
    """The schedule of a family, with a share `offloads` of its units on the host. Many set-ups have the same one."""
    return moved(build(family, shape, pairs=pairs), offloads, by_layer)


@lru_cache(maxsize=64)
def _lowered(schedule: Schedule) -> Schedule:
    return lower(schedule)


@lru_cache(maxsize=64)
def _orders(schedule: Schedule, layers_leaving: int) -> tuple[RankOrder, ...]:
    placement = schedule.shape.placement
    paired = schedule.paired
    return tuple(RankOrder(placement, rank, order, paired, layers_leaving) for rank, order in enumerate(schedule.ranks))


def extended(shape: Shape, measured: Callable[[int], Sequence[float]]) -> Sequence[float]:
    """Times and memory of a step of this shape, as `measured(number of micro-batches)` gives them. A step with very
    many actions is extrapolated from short ones, to within ERROR_OF_EXTENDED. In its steady state a schedule repeats
    itself with every group of micro-batches that occupies all ranks, so times and memory grow by as much with each. Two
    steps give that growth; longer ones are taken until it leads to a third step, twice as long."""
    group = _group(shape)
    groups, rest = divmod(shape.num_microbatches, group)
    short = _SHORT_STEP
    while is_extended(shape) and groups > sum(_short_steps(short)):
        first, second, third = (measured(count * group + rest) for count in _short_steps(short))
        growth = [later - earlier for earlier, later in zip(first, second, strict=True)]
        # In the steady state the third step is the first one and `short` times the growth.
        of_steps = zip(first, third, growth, strict=True)
        is_steady = all(isclose(early + short * grown, late, rel_tol=1e-5) for early, late, grown in of_steps)
        if is_steady:
            return [value + (groups - 2 * short) * grown for value, grown in zip(third, growth, strict=True)]
        short *= 2
    return measured(shape.num_microbatches)


def is_extended(shape: Shape) -> bool:
    """Whether a step of this shape is predicted from short ones, which have fewer micro-batches in all."""
    is_long = 2 * shape.num_units * shape.num_stages > _MOST_ACTIONS
    return is_long and shape.num_microbatches // _group(shape) > sum(_short_steps(_SHORT_STEP))


def _short_steps(short: int) -> tuple[int, int, int]:
    """The groups of micro-batches of the three steps that `extended` takes."""
    return (short, short + 1, 2 * short)


def _group(shape: Shape) -> int:
    """The number of micro-batches that occupy all ranks."""
    return ceil(shape.num_ranks / shape.num_segments)
