"""When each compute action of a schedule starts and ends, for given costs."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, repeat
from math import inf
from typing import NamedTuple

from .action import Action, Kind
from .cost_tables import Costs
from .dependencies import dependencies
from .schedule import Schedule, Shape
from .timeline import Span, Timeline

# An I gives what other stages and segments need of a B.
_ROW = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}


class Rule(NamedTuple):
    """What the action of a kind, stage and segment needs, in numbers: `dependencies` for millions of actions.

    `code` numbers what the action gives in micro-batch 0; every later micro-batch adds `num_segments`. `needs` has, for
    every dependency, the difference to its code and the number of the delay after it in `delays_of`.
    """

    code: int
    needs: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def rules_of(shape: Shape, kind: Kind) -> list[list[Rule]]:
    """The rules of a kind by stage and segment, whatever actions cost."""
    shape, rank_of = shape.filled, shape.placement.rank_of
    stages, segments = range(shape.num_stages), range(shape.num_segments)

    def code_of(action: Action) -> int:
        return (_ROW[action.kind] * len(stages) + action.stage) * shape.num_units + action.segment

    def delay_of(needed: Action, action: Action) -> int:
        if rank_of(needed.stage) == rank_of(action.stage):
            return 0
        return 1 + (_ROW[needed.kind] * len(stages) + needed.stage) * len(segments) + needed.segment

    def rule_of(action: Action) -> Rule:
        code = code_of(action)
        return Rule(code, tuple((code_of(each) - code, delay_of(each, action)) for each in dependencies(action, shape)))

    return [[rule_of(Action(kind, stage, 0, segment)) for segment in segments] for stage in stages]


def delays_of(costs: Costs) -> list[float]:
    """The times from the end of an action until another may start: 0, and those of messages by stage and segment."""
    return [0.0, *chain(*costs.message_f), *chain(*costs.message_b)]


def missing_of(shape: Shape) -> Iterator[int]:
    """The codes of the backwards of segments that a micro-batch lacks, for which its last segment need not wait."""
    rules = rules_of(shape, Kind.B)
    for microbatch in range(shape.num_microbatches):
        for segment in range(shape.segments_of(microbatch), shape.num_segments):
            for of_stage in rules:
                yield of_stage[segment].code + microbatch * shape.num_segments


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
    num_segments, delays = shape.num_segments, delays_of(costs)
    stages, segments = range(shape.num_stages), range(num_segments)
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    rules = {kind: rules_of(shape, kind) for kind in kinds}
    durations = {kind: [[costs.duration(kind, stage, n) for n in segments] for stage in stages] for kind in kinds}
    end_of = [-inf] * (3 * shape.num_stages * shape.num_microbatches * num_segments)
    for code in missing_of(shape):
        end_of[code] = 0.0
    waiting: dict[int, int] = {}  # code -> the rank that needs it; no other can be at that point
    runnable = list(range(len(schedule.ranks)))
    result = Run([[] for _ in schedule.ranks], [[] for _ in schedule.ranks])

    def advance(rank: int) -> Iterator[int]:
        """Runs a rank; yields the code of what it cannot go on without."""
        starts, ends, now = result.starts[rank], result.ends[rank], 0.0
        for kind, stage, microbatch, segment in schedule.ranks[rank]:
            code, needs = rules[kind][stage][segment]
            code += microbatch * num_segments
            for difference, delay in needs:
                if end_of[code + difference] < 0:
                    yield code + difference
                arrival = end_of[code + difference] + delays[delay]
                if arrival > now:
                    now = arrival
            starts.append(now)
            now += durations[kind][stage][segment]
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
