"""When each compute action of a schedule starts and ends, for given costs.

Tested in schedule/test_channels.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

from .action import Action
from .cost_tables import Costs
from .dependencies import dependencies
from .kinds import COMPUTE_KINDS, Kind
from .schedule import Schedule, Shape
from .timeline import Span, Timeline

# An action is known by its outcome: other stages and segments need only the I of a split B.
_OUTCOMES = tuple(dict.fromkeys(kind.facts.outcome for kind in COMPUTE_KINDS))


class Rule(NamedTuple):
    """The duration and `dependencies` of a kind, stage and segment. `code` numbers its outcome in micro-batch 0; every
    later micro-batch adds `num_segments`. `needs` holds, for each dependency, its code relative to `code` and the delay
    from its end until the action may start."""

    code: int
    duration: float
    needs: tuple[tuple[int, float], ...]


def rules_of(shape: Shape, costs: Costs, kinds: Iterable[Kind]) -> dict[Kind, list[list[Rule]]]:
    """The rules of the actions of each kind, by stage and segment."""
    rank_of = shape.placement.rank_of
    units = shape.num_microbatches * shape.num_segments
    with_all_segments = replace(shape, unequal=())  # as if no micro-batch lacked any

    def code_of(action: Action) -> int:
        row = _OUTCOMES.index(action.kind.facts.outcome)
        return (row * shape.num_stages + action.stage) * units + action.segment

    def delay(needed: Action, stage: int) -> float:
        message = needed.kind.facts.sends
        if message is None or rank_of(needed.stage) == rank_of(stage):
            return 0.0
        return costs.duration(message, needed.stage, needed.segment)

    def rule_of(action: Action) -> Rule:
        kind, stage, _, segment = action
        code = code_of(action)
        needs = [(code_of(needed) - code, delay(needed, stage)) for needed in dependencies(action, with_all_segments)]
        return Rule(code, costs.duration(kind, stage, segment), tuple(needs))

    def rules_of_kind(kind: Kind) -> list[list[Rule]]:
        return [
            [rule_of(Action(kind, stage, 0, segment)) for segment in range(shape.num_segments)]
            for stage in range(shape.num_stages)
        ]

    return {kind: rules_of_kind(kind) for kind in kinds}


def pending(shape: Shape) -> list[float]:
    """The end of the action of each code: negative until it is known, 0 for segments that a micro-batch lacks."""
    of_stage: list[float] = []
    for microbatch in range(shape.num_microbatches):
        num_segments = shape.segments_of(microbatch)
        of_stage += [-inf] * num_segments
        of_stage += [0.0] * (shape.num_segments - num_segments)
    return of_stage * (len(_OUTCOMES) * shape.num_stages)


class _Forward(NamedTuple):
    """The forward of a pair, with the code of its outcome and its duration."""

    action: Action
    code: int
    duration: float


def run(schedule: Schedule, costs: Costs) -> list[list[Span]]:
    """The spans of the compute actions of each rank, which start as early as their rank and their dependencies allow. A
    rank that waits for an action that never runs has fewer spans than actions. Both actions of a pair have the same
    span, which takes as long as one after the other."""
    shape = schedule.shape
    costs.check(shape)
    rules = rules_of(shape, costs, {action.kind for actions in schedule.ranks for action in actions})
    end_of = pending(shape)
    num_segments = shape.num_segments
    paired = schedule.paired
    waiting: dict[int, int] = {}  # code -> the only rank that can wait for it
    runnable = list(range(len(schedule.ranks)))
    result: list[list[Span]] = [[] for _ in schedule.ranks]

    def finish(spans: list[Span], action: Action, code: int, start: float, end: float) -> None:
        """Record an action, and let the rank go on that waits for it."""
        spans.append(tuple.__new__(Span, (action, start, end)))  # without a call of Python code
        end_of[code] = end
        if code in waiting:
            runnable.append(waiting.pop(code))

    def advance(rank: int) -> Iterator[int]:
        """Runs a rank; yields the code of each action that it waits for."""
        spans = result[rank]
        now = 0.0
        forward: _Forward | None = None  # of a pair that has not begun
        for action in schedule.ranks[rank]:
            kind, stage, microbatch, segment = action
            code, duration, needs = rules[kind][stage][segment]
            code += microbatch * num_segments
            for difference, delay in needs:
                if end_of[code + difference] < 0:
                    yield code + difference
                arrival = end_of[code + difference] + delay
                if arrival > now:
                    now = arrival
            if action in paired:
                forward = _Forward(action, code, duration)
                continue
            end = now + duration
            if forward is not None:
                end += forward.duration
                finish(spans, forward.action, forward.code, now, end)
                forward = None
            finish(spans, action, code, now, end)
            now = end

    ranks = [advance(rank) for rank in runnable]
    while runnable:
        rank = runnable.pop()
        needed = next(ranks[rank], None)
        if needed is not None:
            waiting[needed] = rank
    return result


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of a schedule of compute actions; costs are equal if not given. Messages overlap with compute and
    with each other. Raises ValueError if the schedule cannot run to its end; `validate` shows why."""
    ranks = run(schedule, costs or Costs.uniform(schedule.shape))
    if any(len(spans) < len(actions) for spans, actions in zip(ranks, schedule.ranks, strict=True)):
        raise ValueError("the schedule cannot run to its end; validate it to see why")
    return Timeline(schedule.shape, tuple(map(tuple, ranks)))
