"""List scheduling: the pipeline runs in time, and every free rank chooses what it does next."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from .action import Action, Kind
from .cost_tables import Costs, memory_change
from .dependencies import dependencies
from .schedule import Schedule, Shape

# Kind (F or B), position of the unit in forward or backward order, stage; smaller goes first.
Priority = Callable[[Kind, int, int], float]


# For each kind and stage a heap of (position, when it can start, action).
_Ready = dict[tuple[Kind, int], list[tuple[int, float, Action]]]


# An F or B of one micro-batch that waits for another: kind, stage, segment, the delay of what it waits for, and its
# number of dependencies.
_Follower = tuple[Kind, int, int, float, int]

# For every F or B that waits: the number of its dependencies that are to come, and the latest arrival of the others.
_Missing = dict[tuple[Kind, int, int, int], tuple[int, float]]


@dataclass
class _Rank:
    """What a rank has done and could do at one moment."""

    index: int
    limit: float
    whole: float  # memory of one micro-batch with all its chunks and segments
    forwards_left: list[int]  # of each micro-batch
    held: list[float]  # memory of each micro-batch
    ready: _Ready
    weights: deque[Action] = field(default_factory=deque)  # the W that could run
    actions: list[Action] = field(default_factory=list)
    free: float = 0.0  # when the last action ends
    used: float = 0.0  # memory in all
    oldest: int = 0  # the first micro-batch with forwards left
    used_by_oldest: float = 0.0  # memory of the micro-batches up to that one

    def admits(self, microbatch: int, memory: float) -> bool:
        """Whether a forward fits and leaves room for the oldest micro-batch with forwards left.

        So the oldest unfinished micro-batch of the whole pipeline finds room on every rank: the
        older ones are gone and the younger ones leave enough. It is never stuck, nor is the next.
        """
        if self.used + memory > self.limit:
            return False
        younger = self.used - self.used_by_oldest
        return microbatch <= self.oldest or self.whole + younger + memory <= self.limit

    def append(self, action: Action, end: float, memory: float) -> None:
        microbatch = action.microbatch
        self.actions.append(action)
        self.free = end
        self.used += memory
        self.held[microbatch] += memory
        if microbatch <= self.oldest:
            self.used_by_oldest += memory
        if action.kind is Kind.F:
            self.forwards_left[microbatch] -= 1
        while self.oldest < len(self.held) - 1 and not self.forwards_left[self.oldest]:
            self.oldest += 1
            self.used_by_oldest += self.held[self.oldest]


class ListScheduler:
    """Makes schedules whose ranks never hold more activation memory than `limits[rank]`.

    A free rank takes the forward or backward that its rule chooses. If there is none that could
    start now it takes its oldest W, unless one is due that could start before `patience` times
    that W has passed. With `split=False` backwards are whole (B) and there is no W. Filling idle
    time with W under a limit is the idea of arXiv 2401.10241, section 3.1; here units are segments.

    Raises ValueError if a rank cannot hold one whole micro-batch.
    """

    def __init__(self, shape: Shape, costs: Costs, limits: Sequence[float], split: bool = True) -> None:
        self._shape, self._costs, self._limits = shape, costs, limits
        self._backward = Kind.I if split else Kind.B
        placement = shape.placement
        self._rank_of = [placement.rank_of(stage) for stage in range(shape.num_stages)]
        self._whole = [
            sum(sum(costs.activation[stage]) for stage in placement.stages_of(rank)) for rank in range(shape.num_ranks)
        ]
        for rank, (whole, limit) in enumerate(zip(self._whole, limits, strict=True)):
            if whole > limit:
                raise ValueError(
                    f"one micro-batch takes {whole:g} of activation memory on rank {rank}, the limit is {limit:g}"
                )
        self._followers: dict[tuple[Kind, int, int], list[_Follower]] = {}  # the same for every micro-batch
        for stage in range(shape.num_stages):
            for segment in range(shape.num_segments):
                for kind in (Kind.F, Kind.B):
                    self._link(Action(kind, stage, 0, segment))

    def _link(self, action: Action) -> None:
        needs = dependencies(action, self._shape)
        for needed in needs:
            delay = self._costs.delay(needed, action, self._shape.placement)
            follower = action.kind, action.stage, action.segment, delay, len(needs)
            self._followers.setdefault((needed.kind, needed.stage, needed.segment), []).append(follower)

    def by_priority(self, priority: Priority, patience: float = 0.0, hold: float = 0.0) -> Schedule:
        """Each rank takes what has the smallest priority among what can start and fits.

        No forward starts if a backward is due before `hold` times that forward has passed.
        """

        def rule(rank: _Rank, now: float) -> tuple[tuple[Kind, int] | None, float]:
            chosen, best, soonest, backward = None, inf, inf, inf
            for (kind, stage), heap in rank.ready.items():
                if not heap:
                    continue
                position, time, action = heap[0]
                if kind is Kind.F:
                    memory = self._costs.activation[stage][action.segment]
                    if not rank.admits(action.microbatch, memory):
                        continue
                if time > now:
                    soonest = min(soonest, time)
                    if kind is Kind.B:
                        backward = min(backward, time)
                    continue
                value = priority(kind, position, stage)
                if value < best:
                    chosen, best = (kind, stage), value
            if chosen is not None and chosen[0] is Kind.F:
                forward = rank.ready[chosen][0][2]
                if backward < now + hold * self._duration(forward):
                    return None, backward
            return chosen, soonest

        return self._run(rule, patience)

    def by_order(self, orders: Sequence[Sequence[Action]], patience: float = 0.0) -> Schedule | None:
        """Each rank keeps to the order of the F and B (or I) in `orders` and adds W only.

        Units of a stage have to come in the order of their micro-batches there. None if the order
        cannot be kept within the limits.
        """
        plans = [
            deque(a if a.kind is Kind.F else a._replace(kind=Kind.B) for a in order if a.kind is not Kind.W)
            for order in orders
        ]

        def rule(rank: _Rank, now: float) -> tuple[tuple[Kind, int] | None, float]:
            if not plans[rank.index]:
                return None, inf
            wanted = plans[rank.index][0]
            heap = rank.ready[wanted.kind, wanted.stage]
            if not heap or heap[0][2] != wanted:
                return None, inf
            memory = self._costs.activation[wanted.stage][wanted.segment]
            if wanted.kind is Kind.F and rank.used + memory > rank.limit:
                return None, inf
            if heap[0][1] > now:
                return None, heap[0][1]
            plans[rank.index].popleft()
            return (wanted.kind, wanted.stage), inf

        schedule = self._run(rule, patience)
        return None if any(plans) else schedule

    def _run(self, rule: Callable[[_Rank, float], tuple[tuple[Kind, int] | None, float]], patience: float) -> Schedule:
        ranks = [self._new_rank(index) for index in range(self._shape.num_ranks)]
        missing: _Missing = {}
        events = [(0.0, self._rank_of[0])]  # when which rank may find something to do
        while events:
            now, index = heappop(events)
            rank = ranks[index]
            if now < rank.free:
                continue
            chosen, soonest = rule(rank, now)
            if chosen is not None:
                action = heappop(rank.ready[chosen])[2]
                if action.kind is Kind.B:
                    action = action._replace(kind=self._backward)
            elif rank.weights and soonest >= now + patience * self._duration(rank.weights[0]):
                action = rank.weights.popleft()
            else:
                continue
            end = now + self._duration(action)
            rank.append(action, end, memory_change(self._costs, action.kind, action.stage, action.segment))
            heappush(events, (end, index))
            if action.kind is Kind.I:
                rank.weights.append(action._replace(kind=Kind.W))
            if action.kind is not Kind.W:
                self._release(action, end, missing, ranks, events)
        return Schedule(self._shape, tuple(tuple(rank.actions) for rank in ranks))

    def _new_rank(self, index: int) -> _Rank:
        shape = self._shape
        stages = shape.placement.stages_of(index)
        ready: _Ready = {(kind, stage): [] for stage in stages for kind in (Kind.F, Kind.B)}
        if 0 in stages:
            for microbatch in range(shape.num_microbatches):
                first = Action(Kind.F, 0, microbatch, 0)
                ready[Kind.F, 0].append((microbatch * shape.num_segments, 0.0, first))
        return _Rank(
            index=index,
            limit=self._limits[index],
            whole=self._whole[index],
            forwards_left=[len(stages) * shape.num_segments] * shape.num_microbatches,
            held=[0.0] * shape.num_microbatches,
            ready=ready,
        )

    def _release(
        self,
        action: Action,
        end: float,
        missing: _Missing,
        ranks: Sequence[_Rank],
        events: list[tuple[float, int]],
    ) -> None:
        """Makes ready what waited for this forward or backward alone."""
        num_segments = self._shape.num_segments
        microbatch, ended = action.microbatch, Kind.F if action.kind is Kind.F else Kind.B
        for follower in self._followers.get((ended, action.stage, action.segment), ()):
            kind, stage, segment, delay, needs = follower
            waiting = kind, stage, microbatch, segment
            number, arrival = missing.pop(waiting, (needs, 0.0))
            arrival = max(arrival, end + delay)
            if number > 1:
                missing[waiting] = number - 1, arrival
                continue
            within = segment if kind is Kind.F else num_segments - 1 - segment
            rank = ranks[self._rank_of[stage]]
            heappush(rank.ready[kind, stage], (microbatch * num_segments + within, arrival, Action(*waiting)))
            heappush(events, (arrival, rank.index))

    def _duration(self, action: Action) -> float:
        return self._costs.duration(action.kind, action.stage, action.segment)
