"""List scheduling: a pipeline simulated in time, in which each free rank picks its next action within its memory.

Tested in schedule/test_automatic.py.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from .action import Action
from .cost_tables import Costs, Table, memory_changes
from .families import FAMILIES
from .kinds import Kind
from .schedule import Schedule, Shape
from .timing import Rule, pending, rules_of

Priority = Callable[[Action], float]
"""Of the forwards and backwards that can start, a rank takes the one with the smallest priority."""


@dataclass
class _Queue:
    """Actions of a rank that run in this order: the forwards or backwards of a stage, or all in the order of 1F1B."""

    rank: int
    waiting: deque[Action]
    start: float = inf  # earliest start of the next action; inf until its dependencies have started


@dataclass
class _Rank:
    """The state of a rank at one moment."""

    number: int
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
    """The forwards and the backwards of each stage, in their order; stages ascend, forwards come first."""
    lines: dict[tuple[int, bool], list[Action]] = defaultdict(list)
    for action in order:
        is_backward = action.kind is not Kind.F
        lines[action.stage, is_backward].append(action)
    return [lines[place] for place in sorted(lines)]


class ListScheduler:
    """Simulates the pipeline in time; each free rank picks its next action, and never holds more activation memory than
    its limit. Raises ValueError if a rank cannot hold one whole micro-batch."""

    def __init__(self, shape: Shape, costs: Costs, limits: Sequence[float], split: bool = True) -> None:
        self._shape = shape
        self._costs = costs
        self._limits = limits
        backward = Kind.I if split else Kind.B
        self._rules = rules_of(shape, costs, (Kind.F, backward, Kind.W))
        self._memory_changes = memory_changes(costs)
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

    def schedule_by(self, priority: Priority | None, patience: float = 0.0, hold: float = 0.0) -> Schedule | None:
        """A free rank takes the forward or backward with the smallest priority among those that can start and fit.

        No forward starts if a backward can start within `hold` times the duration of that forward. A rank that starts
        neither takes its oldest W, unless another action can start within `patience` times the duration of that W.
        Filling idle time with W under a limit is the idea of arXiv 2401.10241, section 3.1; here units are segments.
        Without a priority F and B keep the order of 1F1B; the result is None if the limits do not allow that.
        """
        simulation = _Simulation(
            shape=self._shape,
            costs=self._costs,
            rules=self._rules,
            memory_changes=self._memory_changes,
            ranks=self._idle_ranks(self._in_order if priority is None else self._free),
            priority=priority,
            patience=patience,
            hold=hold,
        )
        return simulation.schedule()

    def _idle_ranks(self, lines_of_ranks: Sequence[Sequence[Sequence[Action]]]) -> list[_Rank]:
        """The ranks before their first action, with the lines of actions that each of them runs."""
        ranks = []
        for number, lines in enumerate(lines_of_ranks):
            ranks.append(
                _Rank(
                    number=number,
                    limit=self._limits[number],
                    whole=self._whole[number],
                    queues=[_Queue(number, deque(line)) for line in lines],
                    held=[0.0] * self._shape.num_microbatches,
                )
            )
        return ranks


class _Choice(NamedTuple):
    """What a free rank does next: the queue whose next action it runs now, None to wait, and the next moment at which
    it may find another action; inf if that is not known yet."""

    queue: _Queue | None
    next_start: float


class _Simulation:
    """One run of the pipeline in simulated time, for one way to choose actions."""

    def __init__(
        self,
        shape: Shape,
        costs: Costs,
        rules: Mapping[Kind, Sequence[Sequence[Rule]]],
        memory_changes: Mapping[Kind, Table],
        ranks: Sequence[_Rank],
        priority: Priority | None,
        patience: float,
        hold: float,
    ) -> None:
        self._shape = shape
        self._costs = costs
        self._rules = rules
        self._memory_changes = memory_changes
        self._ranks = ranks
        self._priority = priority
        self._patience = patience
        self._hold = hold
        self._end_of = pending(shape)
        self._events: list[tuple[float, int]] = []  # a heap of (time, rank): when a rank may find an action to run
        self._queue_of: dict[tuple[Kind, int], _Queue] = {}  # by the kind and stage of the actions in it
        for rank in ranks:
            for queue in rank.queues:
                for action in queue.waiting:
                    self._queue_of[action.kind, action.stage] = queue

    def schedule(self) -> Schedule | None:
        """The schedule at the end of the run; None if some action could never start."""
        self._update_start(self._queue_of[Kind.F, 0])
        while self._events:
            now, number = heappop(self._events)
            rank = self._ranks[number]
            if now < rank.free_at:
                continue
            action = self._take_action(rank, now)
            if action is not None:
                self._run(action, rank, now)
        if any(queue.waiting for rank in self._ranks for queue in rank.queues):
            return None
        return Schedule(self._shape, tuple(tuple(rank.actions) for rank in self._ranks))

    def _take_action(self, rank: _Rank, now: float) -> Action | None:
        """The action that a free rank runs now, taken from what waits on it; None if it is better to wait."""
        choice = self._choice(rank, now)
        if choice.queue is not None:
            choice.queue.start = inf
            return choice.queue.waiting.popleft()
        if not rank.weights:
            return None
        oldest = rank.weights[0]
        waits_for = self._patience * self._costs.w[oldest.stage][oldest.segment]
        return rank.weights.popleft() if choice.next_start >= now + waits_for else None

    def _choice(self, rank: _Rank, now: float) -> _Choice:
        """The forward or backward that a rank runs now, if it should run one."""
        chosen = None
        smallest = inf  # the priority of the chosen one
        duration = 0.0  # of the chosen one if it is a forward, which may be held back for a backward
        next_start = inf  # of any action that cannot start now
        next_backward = inf
        for queue in rank.queues:
            if queue.start == inf:
                continue
            action = queue.waiting[0]
            kind, stage, microbatch, segment = action
            if kind is Kind.F and not rank.admits(microbatch, self._costs.activation[stage][segment]):
                continue
            if queue.start > now:
                next_start = min(next_start, queue.start)
                if kind is not Kind.F:
                    next_backward = min(next_backward, queue.start)
                continue
            priority = 0.0 if self._priority is None else self._priority(action)
            if priority < smallest:
                chosen = queue
                smallest = priority
                duration = self._costs.f[stage][segment] if kind is Kind.F else 0.0
        if chosen is not None and next_backward < now + self._hold * duration:
            return _Choice(None, next_backward)
        return _Choice(chosen, next_start)

    def _run(self, action: Action, rank: _Rank, now: float) -> None:
        """Let a rank run an action from now on, and find out when the actions that need it can start."""
        kind, stage, microbatch, segment = action
        rule = self._rules[kind][stage][segment]
        rank.free_at = now + rule.duration
        self._end_of[rule.code + microbatch * self._shape.num_segments] = rank.free_at
        heappush(self._events, (rank.free_at, rank.number))
        rank.actions.append(action)
        memory = self._memory_changes[kind][stage][segment]
        rank.used += memory
        rank.held[microbatch] += memory
        if kind is Kind.I:
            rank.weights.append(action._replace(kind=Kind.W))
        # What needs it is at its own stage or at one of the two neighbours.
        for near in (stage - 1, stage, stage + 1):
            for needing in (Kind.F, Kind.B, Kind.I):
                queue = self._queue_of.get((needing, near))
                if queue is not None:
                    self._update_start(queue)

    def _update_start(self, queue: _Queue) -> None:
        """Set the time at which the next action of a queue can start, once all its dependencies have started."""
        if queue.start < inf or not queue.waiting:
            return
        kind, stage, microbatch, segment = queue.waiting[0]
        rule = self._rules[kind][stage][segment]
        code = rule.code + microbatch * self._shape.num_segments
        start = 0.0
        for difference, delay in rule.needs:
            end_of_need = self._end_of[code + difference]
            if end_of_need < 0:
                return
            start = max(start, end_of_need + delay)
        queue.start = start
        heappush(self._events, (start, queue.rank))
