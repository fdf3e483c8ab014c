"""List scheduling: the pipeline is simulated in time, and each free rank picks its next action."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product
from math import inf

from .action import Action, Kind
from .cost_tables import Costs, memory_change
from .schedule import Schedule, Shape
from .timing import pending, rules_of

# The priority of a forward or backward; the smallest goes first.
Priority = Callable[[Action], float]


@dataclass
class _Queue:
    """The forwards or the backwards of a stage, which run in this order, the order of units."""

    rank: int
    actions: Sequence[Action]
    position: int = 0  # of the next action
    time: float = inf  # earliest start of the next action; inf until its dependencies have started


@dataclass
class _Rank:
    """The state of a rank at one moment."""

    limit: float
    whole: float  # memory of the largest micro-batch with all its chunks and segments
    queues: dict[tuple[Kind, int], _Queue]  # by kind and stage
    order: deque[Action] | None  # the remaining forwards and backwards, if their order is given
    held: list[float]  # memory of each micro-batch
    used: float = 0.0  # total memory
    weights: deque[Action] = field(default_factory=deque)  # the W that are ready
    actions: list[Action] = field(default_factory=list)
    free: float = 0.0  # when the last action ends

    def candidates(self) -> list[_Queue]:
        """The queues whose next action this rank may run next; all its dependencies have started."""
        if self.order is None:
            return [queue for queue in self.queues.values() if queue.time < inf]
        if not self.order:
            return []
        queue = self.queues[self.order[0][:2]]
        return [queue] if queue.time < inf and queue.actions[queue.position] == self.order[0] else []

    def admits(self, microbatch: int, memory: float) -> bool:
        """Whether a forward fits and, if the order is free, leaves room for the oldest micro-batch with forwards left.

        So the oldest unfinished micro-batch of the pipeline finds room on every rank: older ones are done, and younger
        ones leave enough.
        """
        if self.used + memory > self.limit or self.order is not None:
            return self.used + memory <= self.limit
        forwards = (queue for (kind, _), queue in self.queues.items() if kind is Kind.F)
        oldest = min(each.actions[each.position].microbatch for each in forwards if each.position < len(each.actions))
        return microbatch == oldest or self.whole + sum(self.held[oldest + 1 :]) + memory <= self.limit


class ListScheduler:
    """Makes schedules whose ranks never hold more activation memory than `limits[rank]`.

    With `split=False` backwards are whole (B) and there is no W. Raises ValueError if a rank cannot hold one whole
    micro-batch.
    """

    def __init__(self, shape: Shape, costs: Costs, limits: Sequence[float], split: bool = True) -> None:
        self._shape, self._costs, self._limits = shape, costs, limits
        self._backward = Kind.I if split else Kind.B
        self._rules = rules_of(shape, costs, (Kind.F, self._backward, Kind.W))
        self._whole = [
            sum(sum(costs.activation[stage]) for stage in shape.placement.stages_of(rank))
            for rank in range(shape.num_ranks)
        ]
        for rank, (whole, limit) in enumerate(zip(self._whole, limits, strict=True)):
            if whole > limit:
                raise ValueError(
                    f"one micro-batch takes {whole:g} of activation memory on rank {rank}, the limit is {limit:g}"
                )

    def plan(
        self,
        priority: Priority,
        patience: float = 0.0,
        hold: float = 0.0,
        orders: Sequence[Sequence[Action]] | None = None,
    ) -> Schedule | None:
        """A free rank takes the forward or backward with the smallest priority among those that can start and fit.

        No forward starts if a backward can start within `hold` times the duration of that forward. A rank that starts
        neither takes its oldest W, unless another action can start within `patience` times the duration of that W.
        Filling idle time with W under a limit is the idea of arXiv 2401.10241, section 3.1; here units are segments.

        With `orders` each rank keeps the order of F and B (or I) given there, in which the units of each stage are in
        their own order, and only adds W. Returns None if the limits do not allow that order.
        """
        num_segments, rules, costs = self._shape.num_segments, self._rules, self._costs
        ranks = [self._new_rank(index, orders) for index in range(self._shape.num_ranks)]
        queues = {key: queue for rank in ranks for key, queue in rank.queues.items()}
        end_of = pending(self._shape)
        events: list[tuple[float, int]] = []  # (time, rank): when a rank may find an action to run

        def release(queue: _Queue) -> None:
            """Sets the time when the next action can start, if all its dependencies have started."""
            if queue.time < inf or queue.position == len(queue.actions):
                return
            kind, stage, microbatch, segment = queue.actions[queue.position]
            code, _, needs = rules[kind][stage][segment]
            code += microbatch * num_segments
            time = 0.0
            for difference, delay in needs:
                if end_of[code + difference] < 0:
                    return
                time = max(time, end_of[code + difference] + delay)
            queue.time = time
            heappush(events, (time, queue.rank))

        release(queues[Kind.F, 0])
        while events:
            now, index = heappop(events)
            rank = ranks[index]
            if now < rank.free:
                continue
            queue, soonest = self._choice(rank, now, priority, hold)
            if queue is not None:
                action = queue.actions[queue.position]
                queue.position, queue.time = queue.position + 1, inf
                if rank.order is not None:
                    rank.order.popleft()
            elif rank.weights and soonest >= now + patience * costs.w[rank.weights[0].stage][rank.weights[0].segment]:
                action = rank.weights.popleft()
            else:
                continue
            kind, stage, microbatch, segment = action
            code, duration, _ = rules[kind][stage][segment]
            rank.free = end_of[code + microbatch * num_segments] = now + duration
            heappush(events, (rank.free, index))
            rank.actions.append(action)
            memory = memory_change(costs, kind, stage, segment)
            rank.used += memory
            rank.held[microbatch] += memory
            if kind is Kind.I:
                rank.weights.append(action._replace(kind=Kind.W))
            # Its dependents are at its own stage and the two neighbours.
            for follower in product((Kind.F, self._backward), (stage - 1, stage, stage + 1)):
                if follower in queues:
                    release(queues[follower])
        if any(rank.order for rank in ranks):
            return None
        return Schedule(self._shape, tuple(tuple(rank.actions) for rank in ranks))

    def _choice(self, rank: _Rank, now: float, priority: Priority, hold: float) -> tuple[_Queue | None, float]:
        """The queue that a rank takes from now, or None, and the next time when it could take from another."""
        chosen, best, soonest, backward, duration = None, inf, inf, inf, 0.0
        for queue in rank.candidates():
            action = queue.actions[queue.position]
            kind, stage, microbatch, segment = action
            if kind is Kind.F and not rank.admits(microbatch, self._costs.activation[stage][segment]):
                continue
            if queue.time > now:
                soonest = min(soonest, queue.time)
                if kind is not Kind.F:
                    backward = min(backward, queue.time)
                continue
            value = priority(action)
            if value < best:
                chosen, best = queue, value
                duration = self._costs.f[stage][segment] if kind is Kind.F else 0.0
        if chosen is not None and backward < now + hold * duration:
            return None, backward
        return chosen, soonest

    def _new_rank(self, index: int, orders: Sequence[Sequence[Action]] | None) -> _Rank:
        shape, queues, order = self._shape, {}, None
        kinds = (Kind.F, shape.units), (self._backward, shape.units_backward)
        for stage, (kind, units) in product(shape.placement.stages_of(index), kinds):
            queues[kind, stage] = _Queue(index, [Action(kind, stage, *unit) for unit in units])
        if orders is not None:
            order = deque(a if a.kind is Kind.F else a._replace(kind=self._backward) for a in orders[index])
        return _Rank(self._limits[index], self._whole[index], queues, order, held=[0.0] * shape.num_microbatches)
