"""List scheduling: the pipeline runs in time, and every free rank chooses what it does next."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from .action import Action, Kind
from .costs import Costs
from .dependencies import dependencies
from .memory import memory_change
from .schedule import Schedule, Shape

# Kind (F or B), position of the unit in forward or backward order, stage; smaller goes first.
Priority = Callable[[Kind, int, int], float]


@dataclass
class _Rank:
    """What a rank has done and could do at one moment."""

    limit: float
    whole: float  # memory of one micro-batch with all its chunks and segments
    forwards_left: list[int]  # of each micro-batch
    held: list[float]  # memory of each micro-batch
    actions: list[Action] = field(default_factory=list)
    free: float = 0.0  # when the last action ends
    # For each kind and stage a heap of (position, when it can start, action).
    ready: dict[tuple[Kind, int], list] = field(default_factory=dict)
    weights: deque[Action] = field(default_factory=deque)
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
    """Schedules whose ranks never hold more activation memory than `limits[rank]`.

    A free rank takes, of the forwards and backwards that could start now and fit, the one of the
    smallest priority. If there is none it takes its oldest W, unless it knows of a forward or
    backward that could start before `patience` times that W has passed. With `split=False`
    backwards are whole (B) and there is no W.

    That W fill idle time under a limit is the idea of arXiv 2401.10241, section 3.1; here the
    units are segments. Raises ValueError if a rank cannot hold one whole micro-batch.
    """

    def __init__(self, shape: Shape, costs: Costs, limits: Sequence[float], split: bool = True):
        self.shape, self.costs, self.limits = shape, costs, limits
        self.backward = Kind.I if split else Kind.B
        self.rank_of = [shape.placement.rank_of(stage) for stage in range(shape.num_stages)]
        self.needs: dict[Action, int] = {}  # number of dependencies, for micro-batch 0
        self.followers: dict[Action, list[tuple[Action, float]]] = {}  # and delays, the same way
        for stage in range(shape.num_stages):
            for segment in range(shape.num_segments):
                for kind in (Kind.F, Kind.B):
                    self._link(Action(kind, stage, 0, segment))
        for rank, limit in enumerate(limits):
            if self._whole(rank) > limit:
                raise ValueError(
                    f"one micro-batch takes {self._whole(rank):g} of activation memory on rank {rank}, "
                    f"the limit is {limit:g}"
                )

    def _link(self, action: Action) -> None:
        needs = dependencies(action, self.shape)
        self.needs[action] = len(needs)
        for needed in needs:
            delay = self.costs.delay(needed, action, self.shape.placement)
            self.followers.setdefault(needed, []).append((action, delay))

    def _whole(self, rank: int) -> float:
        return sum(sum(self.costs.activation[stage]) for stage in self.shape.placement.stages_of(rank))

    def schedule(self, priority: Priority, patience: float = 0.0) -> Schedule:
        shape = self.shape
        ranks = [
            _Rank(
                limit=limit,
                whole=self._whole(rank),
                forwards_left=[shape.num_chunks * shape.num_segments] * shape.num_microbatches,
                held=[0.0] * shape.num_microbatches,
                ready={
                    (kind, stage): []
                    for stage in shape.placement.stages_of(rank)
                    for kind in (Kind.F, Kind.B)
                },
            )
            for rank, limit in enumerate(self.limits)
        ]
        first = ranks[self.rank_of[0]].ready[Kind.F, 0]
        for microbatch in range(shape.num_microbatches):
            heappush(first, (microbatch * shape.num_segments, 0.0, Action(Kind.F, 0, microbatch, 0)))

        missing: dict[Action, list] = {}  # dependencies without an end, latest arrival of the others
        events = [(0.0, self.rank_of[0])]  # when which rank may find something to do
        while events:
            now, rank = heappop(events)
            state = ranks[rank]
            if now < state.free:
                continue
            action = self._choose(state, now, priority, patience, events, rank)
            if action is None:
                continue
            end = now + self.costs.duration(action.kind, action.stage, action.segment)
            state.append(action, end, memory_change(self.costs, action.kind, action.stage, action.segment))
            heappush(events, (end, rank))
            if action.kind is Kind.W:
                continue
            if action.kind is Kind.I:
                state.weights.append(action._replace(kind=Kind.W))
            self._release(action, end, missing, ranks, events)
        return Schedule(shape, tuple(tuple(state.actions) for state in ranks))

    def _choose(self, state: _Rank, now, priority, patience, events, rank) -> Action | None:
        best, chosen, soonest = None, None, inf
        for (kind, stage), heap in state.ready.items():
            if not heap:
                continue
            position, time, action = heap[0]
            if kind is Kind.F and not state.admits(
                action.microbatch, self.costs.activation[stage][action.segment]
            ):
                continue
            if time > now:
                soonest = min(soonest, time)
                continue
            value = priority(kind, position, stage)
            if best is None or value < best:
                best, chosen = value, heap
        if chosen is not None:
            action = heappop(chosen)[2]
            return action if action.kind is Kind.F else action._replace(kind=self.backward)
        if not state.weights:
            return None
        _, stage, _, segment = state.weights[0]
        if soonest < now + patience * self.costs.duration(Kind.W, stage, segment):
            return None  # the event at `soonest` is there already
        return state.weights.popleft()

    def _release(self, action: Action, end: float, missing, ranks, events) -> None:
        """Tells the followers of a forward or backward when it ends."""
        kind = Kind.F if action.kind is Kind.F else Kind.B
        num_segments = self.shape.num_segments
        for pattern, delay in self.followers.get(Action(kind, action.stage, 0, action.segment), ()):
            follower = pattern._replace(microbatch=action.microbatch)
            wait = missing.setdefault(follower, [self.needs[pattern], 0.0])
            wait[0] -= 1
            wait[1] = max(wait[1], end + delay)
            if wait[0]:
                continue
            _, time = missing.pop(follower)
            kind, stage, microbatch, segment = follower
            rank = self.rank_of[stage]
            within = segment if kind is Kind.F else num_segments - 1 - segment
            heappush(ranks[rank].ready[kind, stage], (microbatch * num_segments + within, time, follower))
            heappush(events, (time, rank))
