"""When each compute action of a schedule starts and ends, for given costs."""

from typing import NamedTuple

from .action import COMPUTE_KINDS, Action, Kind
from .costs import Costs
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

    def __init__(self, shape: Shape, costs: Costs):
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
        needs = tuple(
            (self._code(needed) - code, self._delay(needed, action))
            for needed in dependencies(action, self._shape)
        )
        duration = self._costs.duration(action.kind, action.stage, action.segment)
        return Rule(code, needs, duration)

    def _delay(self, needed: Action, action: Action) -> float:
        rank_of = self._shape.placement.rank_of
        if rank_of(needed.stage) == rank_of(action.stage):
            return 0.0
        table = self._costs.message_f if needed.kind is Kind.F else self._costs.message_b
        return table[needed.stage][needed.segment]


class Run(NamedTuple):
    """How far the ranks came: `done[rank]` actions, with their spans in order."""

    done: list[int]
    spans: list[list[Span]]


def run(schedule: Schedule, costs: Costs) -> Run:
    """Runs compute actions as early as their rank and their dependencies allow.

    A rank that waits for something that never happens stays where it is; `Run.done` shows it.
    """
    rules = Rules(schedule.shape, costs)
    stride = rules.stride
    of = rules.of
    ends = [-1.0] * rules.num_codes
    waiting: dict[int, list[int]] = {}
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    free = [0.0] * len(schedule.ranks)
    runnable = list(range(len(schedule.ranks)))
    new = tuple.__new__
    while runnable:
        rank = runnable.pop()
        actions, done, now = schedule.ranks[rank], spans[rank], free[rank]
        for index in range(len(done), len(actions)):
            action = actions[index]
            kind, stage, microbatch, segment = action
            code, needs, duration = of[kind][stage][segment]
            code += microbatch * stride
            start = now
            for difference, delay in needs:
                arrival = ends[code + difference]
                if arrival < 0:
                    waiting.setdefault(code + difference, []).append(rank)
                    break
                arrival += delay
                if arrival > start:
                    start = arrival
            else:
                ends[code] = now = start + duration
                done.append(new(Span, (action, start, now)))
                if code in waiting:
                    runnable += waiting.pop(code)
                continue
            break
        free[rank] = now
    return Run([len(done) for done in spans], spans)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of a schedule of compute actions; costs are equal if not given.

    Messages overlap with compute and with each other. Raises ValueError if the schedule cannot
    run to its end; `validate` says why.
    """
    result = run(schedule, costs or Costs.uniform(schedule.shape))
    if any(done < len(rank) for done, rank in zip(result.done, schedule.ranks, strict=True)):
        raise ValueError("the schedule cannot run to its end; validate it to see why")
    return Timeline(schedule.shape, tuple(map(tuple, result.spans)))
