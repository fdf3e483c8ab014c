"""A training step predicted: the lowered schedule in simulated time, in the order of the interpreter, then gradients,
optimizer and parameters. Start with `predict`.

A message starts when it has been sent, its receive has been posted and the message before it on the channel has
arrived. Sends and receives do not hold up a rank; a compute action waits for its message. Beside compute, and one after
the other, a rank gathers and reduces chunks, and copies units to the host and back. Actions wait for the parameters of
their chunk, the end of the step for all gradients, a backward for its unit, and an OFFLOAD for the one before it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import lru_cache, singledispatch
from itertools import batched, chain, islice
from math import ceil, isclose
from typing import Self

from ..schedule import (
    COMPUTE_KINDS,
    Action,
    Kind,
    Lane,
    Schedule,
    Shape,
    Unit,
    build,
    channels_of,
    lower,
    moved,
    partition_state,
)
from ..schedule.cost_tables import Costs, Table
from ..schedule.timeline import Span, Timeline
from .layer_bytes import moved_bytes
from .machine import Machine
from .pair_times import PairTimes, pair_times
from .stage_times import StepEnd, replica_times, step_costs, step_end
from .step_memory import Memory, RankOrder, host_bytes, memory_of_order
from .training_setup import TrainingSetup

_MOST_ACTIONS = 60_000  # longer steps are predicted from short ones
_SHORT_STEP = 6  # groups of micro-batches after which the steady state is usually reached


@dataclass(frozen=True)
class Prediction:
    """A step; the tuples have an entry for each rank."""

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
        of_memory = chain(*(astuple(each) for each in self.memory))
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
    """`schedule` is built from `setup.family` if it is not given; then long steps are predicted from short ones. Raises
    ValueError for a step that cannot run."""
    ends = tuple(step_end(setup, machine, rank) for rank in range(setup.pipeline_parallel))

    def predicted(num_microbatches: int) -> _Step:
        short = replace(setup, num_microbatches=num_microbatches)
        costs = step_costs(short, machine)
        share = 0.0 if short.moves_parts else short.offloads
        actions = moved(schedule, share) if schedule else _built(short.family, short.shape, share, short.has_pairs)
        timeline = timeline_of(short, machine, actions, costs)
        computing = [span for spans in timeline.ranks for span in spans if span.action.kind in COMPUTE_KINDS]
        pipeline = max(span.end for span in computing) - min(span.start for span in computing)
        through = (max(span.end for span in spans) for spans in timeline.ranks)
        reduced = max(now + end.reduce for now, end in zip(through, ends, strict=True))
        seconds = reduced + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step
        return _Step(
            seconds,
            pipeline,
            busy=tuple(timeline.busy(rank) for rank in range(short.pipeline_parallel)),
            host_bytes=tuple(host_bytes(short, order) for order in actions.ranks),
            memory=tuple(memory_of_order(short, order) for order in _orders(actions)),
        )

    if schedule:
        step = predicted(setup.num_microbatches)
    else:
        numbers = extended(setup.shape, lambda num_microbatches: predicted(num_microbatches).numbers())
        step = _Step.of_numbers(numbers, setup.pipeline_parallel)
    return Prediction(
        setup,
        machine,
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
        way_out = "take fewer micro-batches, which repeat themselves, or fewer segments"
        raise ValueError(f"these sizes make {num_actions:,} actions, the most are {most_actions:,} here; {way_out}")


@singledispatch
def timeline_of(setup: TrainingSetup, machine: Machine, schedule: Schedule, costs: Costs) -> Timeline:
    """The actions of a schedule in time, with messages as the interpreter sends them."""
    lowered = _lowered(schedule)
    if setup.partitions_state:
        lowered = replace(lowered, ranks=tuple(tuple(partition_state(actions)) for actions in lowered.ranks))
    aside: dict[Kind, Table] = {}
    if setup.overlaps_data_parallel and setup.data_group.size > 1 and not setup.shards_parameters:
        reduce, gather = zip(*(replica_times(setup, machine, *sizes) for sizes in setup.parameters), strict=True)
        aside = {Kind.REDUCE: tuple((each,) for each in reduce), Kind.GATHER: tuple((each,) for each in gather)}
    if schedule.has_moves:
        bandwidth = machine.device.host_bandwidth
        if not bandwidth:
            raise ValueError(f"{machine.name} has no host_bandwidth in [device], which copies to the host take; add it")
        copies = tuple(tuple(size / bandwidth for size in row) for row in moved_bytes(setup))
        aside |= {Kind.OFFLOAD: copies, Kind.RELOAD: copies}
    return execute_lowered(lowered, costs, aside, pair_times(setup, machine) if setup.hides_experts else None)


@lru_cache(maxsize=64)
def _built(family: str, shape: Shape, offloads: float = 0.0, pairs: bool = False) -> Schedule:
    """Many set-ups differ in other things than their schedule."""
    return moved(build(family, shape, pairs=pairs), offloads)


@lru_cache(maxsize=64)
def _lowered(schedule: Schedule) -> Schedule:
    return lower(schedule)


@lru_cache(maxsize=64)
def _orders(schedule: Schedule) -> tuple[RankOrder, ...]:
    return tuple(RankOrder(schedule.shape.placement, rank, order) for rank, order in enumerate(schedule.ranks))


def extended(shape: Shape, measured: Callable[[int], Sequence[float]]) -> Sequence[float]:
    """Times and memory of a step of this shape, as `measured(number of micro-batches)` gives them. A step with very
    many actions is extrapolated from short ones, to within 1 %. In its steady state a schedule repeats itself with
    every group of micro-batches that occupies all ranks, so times and memory grow by as much with each. Two steps give
    that growth; longer ones are taken until it leads to a third step, twice as long."""
    group = ceil(shape.num_ranks / shape.num_segments)
    groups, rest = divmod(shape.num_microbatches, group)
    short = _SHORT_STEP
    is_long = 2 * shape.num_units * shape.num_stages > _MOST_ACTIONS
    while is_long and groups > 2 * short:
        first, second, third = (measured(count * group + rest) for count in (short, short + 1, 2 * short))
        growth = [b - a for a, b in zip(first, second, strict=True)]
        if all(isclose(a + short * each, b, rel_tol=1e-5) for a, b, each in zip(first, third, growth, strict=True)):
            return [value + (groups - 2 * short) * each for value, each in zip(third, growth, strict=True)]
        short *= 2
    return measured(shape.num_microbatches)


@dataclass
class _Messages:
    """The messages of one channel that have not been received, in the order of its sends."""

    sent: deque[tuple[float, float]] = field(default_factory=deque)  # start, seconds
    posted: deque[float] = field(default_factory=deque)
    arrived: float = 0.0  # the time of the last one that was received
    waiting: int | None = None  # the rank that needs the next message

    def receive(self) -> float:
        """The time at which the next message arrives."""
        start, seconds = self.sent.popleft()
        self.arrived = max(start, self.posted.popleft(), self.arrived) + seconds
        return self.arrived


def _saved(pairs: PairTimes, together: Sequence[Action], before: Action | None) -> float:
    """What a pair saves, or a forward of Megatron's, whose orders have no pairs, beside the backward `before` it."""
    *forward, action = together
    if forward:
        return pairs.saved(forward[0], action)
    if action.kind is Kind.F and before is not None and before.kind is Kind.B:
        return pairs.saved(action, before)
    return 0.0


def execute_lowered(
    lowered: Schedule, costs: Costs, aside: Mapping[Kind, Table] | None = None, pairs: PairTimes | None = None
) -> Timeline:
    """The timeline of the compute actions, and of GATHER, REDUCE, OFFLOAD and RELOAD if `aside` has the seconds of the
    kind, by stage and segment. With `pairs` the two of a pair save time; in an order without pairs, which is Megatron's
    then, a backward and the forward right after it, which is of another unit. Raises ValueError if the costs do not
    fit, or if the schedule cannot run to its end."""
    costs.check(lowered.shape)
    aside, placement = aside or {}, lowered.shape.placement
    tables = {kind: costs.tables(kind) for kind in Kind}
    queues = defaultdict[object, _Messages](_Messages)  # by channel
    channels = {  # by kind of message and stage
        key: queues[channel]
        for rank in range(placement.num_ranks)
        for key, channel in channels_of(placement, rank).items()
    }
    runnable = list(range(len(lowered.ranks)))

    def run(rank: int, spans: list[Span]) -> Iterator[_Messages]:
        """Runs a rank; yields the queue of each message that has not been sent."""
        now = 0.0
        lanes = dict.fromkeys(Lane, 0.0)  # the end of each
        parameters: dict[int, float] = {}  # the times at which those of a stage are complete
        there: dict[Unit, float] = {}  # the ends of the last copies of units
        before: Action | None = None  # the last compute action
        together: list[Action] = []  # the forward of a pair that has not begun
        for action in lowered.ranks[rank]:
            kind, stage, _, segment = action
            facts = kind.facts
            if facts.lane is Lane.COMPUTE:
                if facts.receives is not None and (facts.receives, stage) in channels:
                    queue = channels[facts.receives, stage]
                    while not (queue.sent and queue.posted):
                        yield queue
                    now = max(now, queue.receive())
                if facts.needs_parameters:
                    now = max(now, parameters.get(stage, 0.0))
                if facts.gives_input_gradient:
                    now = max(now, there.pop(action.unit, 0.0))
                if action in lowered.paired:
                    together = [action]
                    continue
                together.append(action)
                end = now + sum(table[each.stage][each.segment] for each in together for table in tables[each.kind])
                if pairs is not None:
                    end = max(now, end - _saved(pairs, together, before))
                spans += [Span(each, now, end) for each in together]
                together = []
                before = None if lowered.paired else action
                now = end
            elif kind in aside:
                start = max(now, lanes[facts.lane], there.get(action.unit, 0.0))
                end = start + aside[kind][stage][segment]
                lanes[facts.lane] = end
                spans.append(Span(action, start, end))
                if kind is Kind.GATHER:
                    parameters[stage] = end
                elif not facts.is_of_chunk:
                    there[action.unit] = end
                if kind is Kind.OFFLOAD:  # waits for the one before it
                    now = start
            elif (kind, stage) not in channels:
                continue
            elif facts.is_send:
                queue = channels[kind, stage]
                (table,) = tables[kind]
                queue.sent.append((now, table[stage][segment]))
                if queue.waiting is not None:
                    runnable.append(queue.waiting)
                    queue.waiting = None
            else:
                channels[kind, stage].posted.append(now)

    spans: list[list[Span]] = [[] for _ in lowered.ranks]
    ranks = [run(rank, spans[rank]) for rank in runnable]
    left = set(runnable)
    while runnable:
        rank = runnable.pop()
        queue = next(ranks[rank], None)
        if queue is None:
            left.remove(rank)
        else:
            queue.waiting = rank
    if left:
        raise ValueError("the schedule cannot run to its end; validate it to see why")
    # GATHER and REDUCE may start after compute that they were put before.
    in_order = (tuple(sorted(each, key=lambda span: span.start)) for each in spans)
    return Timeline(lowered.shape, tuple(in_order), "s")
