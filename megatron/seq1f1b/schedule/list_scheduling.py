"""List scheduling: a pipeline simulated in time, in which each free rank picks its next action within its memory.

Tested in schedule/test_automatic.py.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby, product
from math import inf

from .action import Action
from .cost_tables import Costs, memory_changes
from .families import FAMILIES
from .kinds import Kind
from .schedule import Schedule, Shape
from .timing import pending, rules_of


@dataclass
class _Queue:
    """Actions of a rank that run in this order: the forwards or backwards of a stage, or all in the order of 1F1B."""

    rank: int
    waiting: deque[Action]
    start: float = inf  # earliest start of the next action; inf until its dependencies have started


@dataclass
class _Rank:
    """The state of a rank at one moment."""

    limit: float
    whole: float  # memory of the largest micro-batch with all its chunks and segments
    queues: list[_Queue]
    held: list[float]  # memory of each micro-batch
    used: float = 0.0  # total memory
    weights: deque[Action] = field(default_factory=deque)  # the W that are ready
    actions: list[Action] = field(default_factory=list)
    free_at: float = 0.0  # when the last action ends

    def admits(self, microbatch: int, memory: float) -> bool:
        """Whether a forward of a micro-batch fits, and leaves room for all of the oldest micro-batch that has forwards
        left. So the oldest one never waits for memory: those before it have ended, and those after it have left it
        room. Where all actions are in one order, no forward can take the oldest one's room, so it only has to fit."""
        fits = self.used + memory <= self.limit
        if not fits or len(self.queues) == 1:
            return fits
        heads = (queue.waiting[0] for queue in self.queues if queue.waiting)
        oldest = min(action.microbatch for action in heads if action.kind is Kind.F)
        return microbatch == oldest or self.whole + sum(self.held[oldest + 1 :]) + memory <= self.limit


def _as_kind(action: Action, backward: Kind) -> Action:
    """The action itself if it is a forward, else the backward as one of this kind."""
    return action if action.kind is Kind.F else action._replace(kind=backward)


def _lines(order: Sequence[Action]) -> list[list[Action]]:
    """The forwards and the backwards of each stage, in their order."""

    def line_of(action: Action) -> tuple[int, bool]:
        return action.stage, action.kind is not Kind.F

    return [list(line) for _, line in groupby(sorted(order, key=line_of), line_of)]


class ListScheduler:
    """Simulates the pipeline in time; each free rank picks its next action, and never holds more activation memory than
    its limit. Raises ValueError if a rank cannot hold one whole micro-batch."""

    def __init__(self, shape: Shape, costs: Costs, limits: Sequence[float], split: bool = True) -> None:
        self._shape = shape
        self._costs = costs
        self._limits = limits
        backward = Kind.I if split else Kind.B
        self._kinds = Kind.F, backward
        self._rules = rules_of(shape, costs, (*self._kinds, Kind.W))
        # The activation memory of the largest micro-batch on each rank.
        self._whole = []
        for rank in range(shape.num_ranks):
            self._whole.append(sum(sum(costs.activation[stage]) for stage in shape.placement.stages_of(rank)))
        # The actions of each rank, in one line in the order of 1F1B, or in a line for each stage and kind.
        orders = FAMILIES["1f1b"](shape).schedule().ranks
        in_order = [[_as_kind(action, backward) for action in order] for order in orders]
        self._in_order = [[order] for order in in_order]
        self._free = [_lines(order) for order in in_order]
        for rank, (whole, limit) in enumerate(zip(self._whole, limits, strict=True)):
            if whole > limit:
                raise ValueError(
                    f"one micro-batch takes {whole:g} of activation memory on rank {rank}, the limit is {limit:g}"
                )

    def schedule_by(
        self, priority: Callable[[Action], float] | None, patience: float = 0.0, hold: float = 0.0
    ) -> Schedule | None:
        """A free rank takes the forward or backward with the smallest priority among those that can start and fit.

        No forward starts if a backward can start within `hold` times the duration of that forward. A rank that starts
        neither takes its oldest W, unless another action can start within `patience` times the duration of that W.
        Filling idle time with W under a limit is the idea of arXiv 2401.10241, section 3.1; here units are segments.
        Without a priority F and B keep the order of 1F1B; the result is None if the limits do not allow that.
        """
        num_segments = self._shape.num_segments
        rules = self._rules
        changes = memory_changes(self._costs)
        ranks = self._idle_ranks(self._in_order if priority is None else self._free)
        queues: dict[tuple[Kind, int], _Queue] = {}  # by kind and stage
        for rank in ranks:
            for line in rank.queues:
                queues |= {(action.kind, action.stage): line for action in line.waiting}
        end_of = pending(self._shape)
        events: list[tuple[float, int]] = []  # (time, rank): when a rank may find an action to run

        def set_start(queue: _Queue) -> None:
            """Set the time when the next action can start, if all its dependencies have started."""
            if queue.start < inf or not queue.waiting:
                return
            kind, stage, microbatch, segment = queue.waiting[0]
            code, _, needs = rules[kind][stage][segment]
            code += microbatch * num_segments
            time = 0.0
            for difference, delay in needs:
                end_of_need = end_of[code + difference]
                if end_of_need < 0:
                    return
                time = max(time, end_of_need + delay)
            queue.start = time
            heappush(events, (time, queue.rank))

        set_start(queues[Kind.F, 0])
        while events:
            now, index = heappop(events)
            rank = ranks[index]
            if now < rank.free_at:
                continue
            queue, soonest = self._choice(rank, now, priority, hold)
            if queue is not None:
                action = queue.waiting.popleft()
                queue.start = inf
            elif rank.weights and soonest >= now + patience * self._duration_of_weights(rank.weights[0]):
                action = rank.weights.popleft()
            else:
                continue
            kind, stage, microbatch, segment = action
            code, duration, _ = rules[kind][stage][segment]
            rank.free_at = now + duration
            end_of[code + microbatch * num_segments] = rank.free_at
            heappush(events, (rank.free_at, index))
            rank.actions.append(action)
            memory = changes[kind][stage][segment]
            rank.used += memory
            rank.held[microbatch] += memory
            if kind is Kind.I:
                rank.weights.append(action._replace(kind=Kind.W))
            # Its dependents are at its own stage and the two neighbours.
            for follower in product(self._kinds, (stage - 1, stage, stage + 1)):
                if follower in queues:
                    set_start(queues[follower])
        if any(queue.waiting for queue in queues.values()):
            return None
        return Schedule(self._shape, tuple(tuple(rank.actions) for rank in ranks))

    def _duration_of_weights(self, action: Action) -> float:
        return self._costs.w[action.stage][action.segment]

    def _idle_ranks(self, lines_of_ranks: Sequence[Sequence[Sequence[Action]]]) -> list[_Rank]:
        """The ranks before their first action, with the lines of actions that each of them runs."""
        ranks = []
        for number, lines in enumerate(lines_of_ranks):
            ranks.append(
                _Rank(
                    limit=self._limits[number],
                    whole=self._whole[number],
                    queues=[_Queue(number, deque(line)) for line in lines],
                    held=[0.0] * self._shape.num_microbatches,
                )
            )
        return ranks

    def _choice(
        self, rank: _Rank, now: float, priority: Callable[[Action], float] | None, hold: float
    ) -> tuple[_Queue | None, float]:
        """The queue whose next action a rank runs now, or None to wait; and the next time when it may find another
        one."""
        chosen = None
        best = inf  # the smallest priority among those that can start now
        soonest = inf  # when the next one can start
        soonest_backward = inf  # when the next backward can start
        duration = 0.0  # of the chosen one if it is a forward, which may be held back for a backward
        for queue in rank.queues:
            if queue.start == inf:
                continue
            action = queue.waiting[0]
            kind, stage, microbatch, segment = action
            if kind is Kind.F and not rank.admits(microbatch, self._costs.activation[stage][segment]):
                continue
            if queue.start > now:
                soonest = min(soonest, queue.start)
                if kind is not Kind.F:
                    soonest_backward = min(soonest_backward, queue.start)
                continue
            value = priority(action) if priority else 0.0
            if value < best:
                chosen = queue
                best = value
                duration = self._costs.f[stage][segment] if kind is Kind.F else 0.0
        if chosen is not None and soonest_backward < now + hold * duration:
            return None, soonest_backward
        return chosen, soonest
