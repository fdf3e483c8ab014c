"""When each action ran: one form for simulated and measured steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from .action import Action
from .kinds import COMPUTE_KINDS
from .schedule import Shape


class Span(NamedTuple):
    """An action with its start and end, in `Timeline.time_unit` since the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """For each rank, its spans in the order of their start.

    `time_unit` is "s" for measured and estimated times, "" for costs without a unit. `meta` holds anything that JSON
    can express, such as the name of the schedule.
    """

    shape: Shape
    ranks: tuple[tuple[Span, ...], ...]
    time_unit: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> float:
        return min(span.start for spans in self.ranks for span in spans)

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end on any rank."""
        return max(span.end for spans in self.ranks for span in spans) - self.start

    def busy(self, rank: int) -> float:
        """Time that the rank spends in compute actions (F, B, I, W)."""
        return busy_time(self.ranks[rank])

    def paired(self, rank: int) -> frozenset[Action]:
        """The compute actions of a rank that share their time with another: those of pairs."""
        beside: set[Action] = set()
        last: Span | None = None
        for span in self.ranks[rank]:
            if span.action.kind not in COMPUTE_KINDS:
                continue
            if last is not None and span.start < last.end:
                beside |= {last.action, span.action}
            last = span
        return frozenset(beside)

    @property
    def bubble_ratio(self) -> float:
        """Idle time of all ranks over their total time, from step start to step end."""
        total = len(self.ranks) * self.makespan
        busy = sum(self.busy(rank) for rank in range(len(self.ranks)))
        # Sums of floats are not exact: a rank that never idles may seem busy for longer than the step.
        return max(0.0, total - busy) / total if total else 0.0

    @property
    def longest_stretch(self) -> float:
        """The longest time that a rank takes from its own first action to its last."""
        return max((spans[-1].end - spans[0].start for spans in self.ranks if spans), default=0.0)


def busy_time(spans: Iterable[Span]) -> float:
    """Time in the compute actions of a rank, in the order of their starts; the two of a pair share theirs."""
    busy = 0.0
    ended = -inf
    for action, start, end in spans:
        if action.kind in COMPUTE_KINDS and end > ended:
            busy += end - max(start, ended)
            ended = end
    return busy
