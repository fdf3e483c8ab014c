"""When each compute action of a schedule starts and ends, for given costs."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, product, repeat
from math import inf
from typing import NamedTuple

from .action import Action, Kind
from .cost_tables import Costs
from .dependencies import dependencies, outcome
from .schedule import Schedule, Shape
from .timeline import Span, Timeline

_ROW = {Kind.F: 0, Kind.B: 1, Kind.W: 2}


class Rule(NamedTuple):
    """The rule of a kind, stage and column of units (see `Shape.columns`).

    `code` numbers what the action gives for the unit of the column; `needs` holds, for every dependency, the difference
    to its code and the time that its message takes.
    """

    code: int
    needs: tuple[tuple[int, float], ...]
    duration: float


class _Needs(NamedTuple):
    """What of a rule follows from the shape alone: `needs` holds numbers of delays, `cell` is that of a table."""

    code: int
    needs: tuple[tuple[int, int], ...]
    cell: int


@lru_cache(maxsize=64)
def _needs(shape: Shape, kind: Kind) -> list[list[_Needs]]:
    """`dependencies` as a table by stage and column, so that millions of actions take seconds, whatever they cost.

    Outcomes have codes, dense from 0, in the order of the units of a stage. The dependencies of an action never leave
    its micro-batch. Delays are numbered as in `_delays`.
    """
    stages, columns, rank_of = range(shape.num_stages), shape.columns, shape.placement.rank_of

    def code_of(action: Action) -> int:
        kind, stage, *unit = outcome(action)
        return (_ROW[kind] * len(stages) + stage) * shape.num_units + shape.column(*unit)

    def delay_of(needed: Action, action: Action) -> int:
        if rank_of(needed.stage) == rank_of(action.stage):
            return 0
        return 1 + (_ROW[needed.kind] * len(stages) + needed.stage) * len(columns) + shape.column(*needed[2:])

    def needs_of(action: Action) -> _Needs:
        code = code_of(action)
        needs = tuple((code_of(each) - code, delay_of(each, action)) for each in dependencies(action, shape))
        return _Needs(code, needs, action.stage * len(columns) + shape.column(*action[2:]))

    return [[needs_of(Action(kind, stage, *unit)) for unit in columns] for stage in stages]


def _delays(costs: Costs) -> list[float]:
    """Seconds from the end of an action until another may start: none, and those of messages by stage and column."""
    return [0.0, *chain(*costs.message_f), *chain(*costs.message_b)]


def rules_of(shape: Shape, costs: Costs, kinds: Iterable[Kind]) -> dict[Kind, list[list[Rule]]]:
    """The rules by kind, stage and column."""
    delays = _delays(costs)

    def rule(kind: Kind, stage: int, column: int) -> Rule:
        code, needs, _ = _needs(shape, kind)[stage][column]
        duration = costs.duration(kind, stage, column)
        return Rule(code, tuple((difference, delays[number]) for difference, number in needs), duration)

    stages, columns = range(shape.num_stages), range(len(shape.columns))
    return {kind: [[rule(kind, stage, column) for column in columns] for stage in stages] for kind in kinds}


class Run(NamedTuple):
    """How far the ranks came: for each rank, the starts and ends of the actions that ran."""

    starts: list[list[float]]
    ends: list[list[float]]


def run(schedule: Schedule, costs: Costs) -> Run:
    """Runs compute actions as early as their rank and their dependencies allow.

    A rank that waits for an action that never runs stops there, and its lists stay short.
    """
    shape = schedule.shape
    costs.check(shape)
    delays, microbatches = _delays(costs), range(shape.num_microbatches)
    firsts, shifts = [shape.column(each, 0) for each in microbatches], [*map(shape.shift, microbatches)]
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    rules = {kind: _needs(shape, kind) for kind in kinds}
    cells = [*product(range(shape.num_stages), range(len(shape.columns)))]
    durations = {kind: [costs.duration(kind, *cell) for cell in cells] for kind in kinds}
    end_of = [-inf] * (len(_ROW) * shape.num_stages * shape.num_units)
    waiting: dict[int, int] = {}  # code -> the rank that needs it; no other can be at that point
    runnable = list(range(len(schedule.ranks)))
    result = Run([[] for _ in schedule.ranks], [[] for _ in schedule.ranks])

    def advance(rank: int) -> Iterator[int]:
        """Runs a rank; yields the code of what it cannot go on without."""
        starts, ends, now = result.starts[rank], result.ends[rank], 0.0
        for kind, stage, microbatch, segment in schedule.ranks[rank]:
            code, needs, cell = rules[kind][stage][firsts[microbatch] + segment]
            code += shifts[microbatch]
            for difference, delay in needs:
                if end_of[code + difference] < 0:
                    yield code + difference
                arrival = end_of[code + difference] + delays[delay]
                if arrival > now:
                    now = arrival
            starts.append(now)
            now += durations[kind][cell]
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
