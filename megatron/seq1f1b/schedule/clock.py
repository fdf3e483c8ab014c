"""Clocks: a nominal tick for every action.

Ticks only sort: a rank runs its actions in the order of their ticks and waits for none. If every action has a later
tick than its dependencies, the schedule has no cycle and cannot deadlock, whatever the real durations are. The backward
pass mirrors the forward pass, so a clock is one function and one number.

Tested in schedule/test_families.py.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat
from math import ceil

from .action import Action
from .kinds import Kind
from .schedule import Schedule, Shape

Tick = Callable[[int, int], int]  # of the forward of a unit at a stage
Lag = Callable[[int], int]  # for a rank, the number of other I between the I and the W of a unit


@dataclass(frozen=True)
class Clock:
    """The ticks of a schedule.

    `tick(unit, stage)` is the tick of a forward; it must grow with the stage and with the segment. The backward of the
    j-th unit in backward order (micro-batches ascending, segments descending) at a stage has the tick
    `turn + tick(j, last_stage - stage)`. Backwards are whole (B) unless `lag` is given, see `split`.

    If it `has_pairs`, a backward one tick after a forward runs beside it (pairs.py). Forwards then have even ticks and
    backwards odd ones, and every action comes two ticks after its dependencies at least: so a pair, too, is later than
    all that it needs.
    """

    shape: Shape
    tick: Tick
    turn: int
    lag: Lag | None = None
    has_pairs: bool = False

    def split(self, lag: Lag) -> "Clock":
        """The same clock with every B split into an I and a W; the W comes `lag(rank)` I of that rank later."""
        return replace(self, lag=lag)

    @property
    def num_actions(self) -> int:
        return self.shape.num_stages * self.shape.num_units * (2 if self.lag is None else 3)

    def schedule(self) -> Schedule:
        """The orders of all ranks."""
        orders = [tuple(self.order(rank)) for rank in range(self.shape.num_ranks)]
        paired = frozenset(chain.from_iterable(map(self.pairs_in, orders)))
        return Schedule(self.shape, tuple(orders), paired)

    def pairs_in(self, order: Sequence[Action]) -> frozenset[Action]:
        """The forwards in the order of a rank that run beside the backward after them."""
        if not self.has_pairs:
            return frozenset()
        with_ticks = zip(order, self.ticks(order), strict=True)
        return frozenset(
            action
            for (action, tick), (following, later) in pairwise(with_ticks)
            if action.kind is Kind.F and following.kind.facts.gives_input_gradient and later == tick + 1
        )

    def order(self, rank: int) -> list[Action]:
        """The compute actions of a rank, in the order of their ticks."""
        shape = self.shape
        tick = self.tick
        turn = self.turn
        forwards = shape.units
        backwards = shape.units_backward
        units = range(shape.num_units)
        last_stage = shape.num_stages - 1
        actions: list[Action] = []
        ticks: list[int] = []
        for stage in shape.placement.stages_of(rank):
            for kind, of_kind in (Kind.F, forwards), (Kind.B, backwards):
                # tuple.__new__ makes an Action without a call of Python code, several times faster.
                actions += map(tuple.__new__, repeat(Action), ((kind, stage, *unit) for unit in of_kind))
            ticks += [tick(unit, stage) for unit in units]
            ticks += [turn + tick(unit, last_stage - stage) for unit in units]
        order = [actions[index] for index in sorted(range(len(actions)), key=ticks.__getitem__)]
        return order if self.lag is None else _split(order, self.lag(rank))

    def ticks(self, order: Sequence[Action]) -> list[int]:
        """The ticks of the actions of an order; a W has that of the action before it."""
        tick = self.tick
        turn = self.turn
        first_units = self.shape.first_units
        last_stage = self.shape.num_stages - 1
        ticks: list[int] = []
        now = 0
        for kind, stage, microbatch, segment in order:
            if kind is Kind.F:
                now = tick(first_units[microbatch] + segment, stage)
            elif kind is not Kind.W:
                now = turn + tick(first_units[microbatch + 1] - 1 - segment, last_stage - stage)
            ticks.append(now)
        return ticks


def _split(order: Sequence[Action], lag: int) -> list[Action]:
    """Every B becomes an I; its W follows `lag` I later. No other action needs a W, so this cannot close a cycle."""
    result: list[Action] = []
    waiting: deque[Action] = deque()
    for action in order:
        if action.kind is Kind.B:
            waiting.append(action._replace(kind=Kind.W))
            action = action._replace(kind=Kind.I)
        result.append(action)
        if len(waiting) > lag:
            result.append(waiting.popleft())
    return [*result, *waiting]


def straight(shape: Shape, period: int = 1, hop: int = 1) -> Tick:
    """A tick for units that pass through all chunks, `hop` ticks a stage; a rank takes in a new unit every `period`
    ticks for each of its chunks. If a stage would share its ticks with an earlier one of its rank, units pause before
    it until a tick is free."""
    cycle = period * shape.num_chunks
    placement = shape.placement
    taken: list[set[int]] = [set() for _ in range(shape.num_ranks)]
    starts: list[int] = []
    for stage in range(shape.num_stages):
        start = starts[-1] + hop if starts else 0
        of_rank = taken[placement.rank_of(stage)]
        while start % cycle in of_rank:
            start += period
        of_rank.add(start % cycle)
        starts.append(start)
    return lambda unit, stage: cycle * unit + starts[stage]


def first_turn(shape: Shape, tick: Tick) -> int:
    """The earliest turn with which the last stage ends all forwards of a micro-batch before its first backward."""
    last_stage = shape.num_stages - 1
    return 1 + max(tick(end - 1, last_stage) - tick(first, 0) for first, end in pairwise(shape.first_units))


def smallest_group(shape: Shape) -> int:
    """Units in the fewest whole micro-batches that occupy all ranks at once: k * ceil(P / k), with the largest k."""
    return shape.num_segments * ceil(shape.num_ranks / shape.num_segments)


def grouped(shape: Shape, group: int, period: int = 1, hop: int = 1) -> Tick:
    """A tick for model chunks that take turns: `group` units each, a unit every `period` ticks, `hop` ticks a stage.

    A short last group leaves ticks empty. Raises ValueError if a group ends before its first unit is back on rank 0,
    that is, if `period * group < hop * P`.
    """
    num_ranks = shape.num_ranks
    num_chunks = shape.num_chunks
    if period * group < hop * num_ranks:
        raise ValueError(f"groups of {group} units do not fit {shape}")

    def tick(unit: int, stage: int) -> int:
        chunk, depth = divmod(stage, num_ranks)
        index, within = divmod(unit, group)
        return period * ((index * num_chunks + chunk) * group + within) + hop * depth

    return tick
