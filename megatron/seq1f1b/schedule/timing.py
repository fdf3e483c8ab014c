"""When each compute action of a schedule starts and ends, for given costs."""

from collections.abc import Iterator
from itertools import repeat
from math import inf
from typing import NamedTuple

from .action import COMPUTE_KINDS, Action, Kind
from .cost_tables import Costs
from .dependencies import dependencies, outcome
from .schedule import Schedule, Shape
from .timeline import Span, Timeline

_ROW = {Kind.F: 0, Kind.B: 1, Kind.W: 2}


class Rule(NamedTuple):
    """The rule of a kind, stage and segment, for all micro-batches.

    `code` numbers what the action gives (see `Rules`) for micro-batch 0; `needs` holds, for every
    dependency, the difference to its code and the time that its message takes.
    """

    code: int
    needs: tuple[tuple[int, float], ...]
    duration: float


class Rules:
    """`dependencies` and costs as tables, so that millions of actions are timed in seconds.

    Every outcome has a code, dense from 0; the codes of successive micro-batches differ by
    `stride`. The dependencies of an action never leave its micro-batch, so they are computed once
    per kind, stage and segment.
    """

    def __init__(self, shape: Shape, costs: Costs) -> None:
        costs.check(shape)
        self.stride = shape.num_segments
        self.num_codes = len(_ROW) * shape.num_stages * shape.num_units
        self._shape, self._costs = shape, costs
        self.of = {
            kind: [
                [self._rule(Action(kind, stage, 0, segment)) for segment in range(self.stride)]
                for stage in range(shape.num_stages)
            ]
            for kind in COMPUTE_KINDS
        }

    def _code(self, action: Action) -> int:
        value = outcome(action)
        row = _ROW[value.kind] * self._shape.num_stages + value.stage
        return row * self._shape.num_units + value.segment

    def _rule(self, action: Action) -> Rule:
        code = self._code(action)
        placement = self._shape.placement
        needs = tuple(
            (self._code(needed) - code, self._costs.delay(needed, action, placement))
            for needed in dependencies(action, self._shape)
        )
        duration = self._costs.duration(action.kind, action.stage, action.segment)
        return Rule(code, needs, duration)


class Run(NamedTuple):
    """How far the ranks came: for each rank, the starts and ends of the actions that ran."""

    starts: list[list[float]]
    ends: list[list[float]]


def run(schedule: Schedule, costs: Costs) -> Run:
    """Runs compute actions as early as their rank and their dependencies allow.

    A rank that waits for an action that never runs stops there, and its lists stay short.
    """
    rules = Rules(schedule.shape, costs)
    of, stride = rules.of, rules.stride
    end_of = [-inf] * rules.num_codes
    waiting: dict[int, int] = {}  # code -> the rank that needs it; no other can be at that point
    runnable = list(range(len(schedule.ranks)))
    result = Run([[] for _ in schedule.ranks], [[] for _ in schedule.ranks])

    def advance(rank: int) -> Iterator[int]:
        """Runs a rank; yields the code of what it cannot go on without."""
        starts, ends, now = result.starts[rank], result.ends[rank], 0.0
        for kind, stage, microbatch, segment in schedule.ranks[rank]:
            code, needs, duration = of[kind][stage][segment]
            code += microbatch * stride
            for difference, delay in needs:
                if end_of[code + difference] < 0:
                    yield code + difference
                arrival = end_of[code + difference] + delay
                if arrival > now:
                    now = arrival
            starts.append(now)
            now += duration
            ends.append(now)
            end_of[code] = now
            if code in waiting:
                runnable.append(waiting.pop(code))

    ranks = [advance(rank) for rank in runnable]
    while runnable:
        rank = runnable.pop()
        needed = next(ranks[rank], None)
        if needed is not None:
            waiting[needed] = rank
    return result


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of a schedule of compute actions; costs are equal if not given.

    Messages overlap with compute and with each other. Raises ValueError if the schedule cannot
    run to its end; `validate` shows why.
    """
    result = run(schedule, costs or Costs.uniform(schedule.shape))
    ranks = []
    for actions, starts, ends in zip(schedule.ranks, *result, strict=True):
        if len(ends) < len(actions):
            raise ValueError("the schedule cannot run to its end; validate it to see why")
        # A tuple is a Span without a call of Python code.
        spans = map(tuple.__new__, repeat(Span), zip(actions, starts, ends, strict=True))
        ranks.append(tuple(spans))
    return Timeline(schedule.shape, tuple(ranks))
