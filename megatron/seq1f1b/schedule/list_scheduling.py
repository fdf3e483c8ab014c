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


@dataclass(eq=False)
class _Queue:
    """Actions of a rank that run in this order: the forwards or backwards of a stage, or all, if orders are given."""

    rank: int
    left: deque[Action]
    time: float = inf  # earliest start of the next action; inf until its dependencies have started


@dataclass
class _Rank:
    """The state of a rank at one moment."""

    limit: float
    reserve: float  # memory of the largest micro-batch with all its chunks and segments; 0 if orders are given
    queues: list[_Queue]
    held: list[float]  # memory of each micro-batch
    used: float = 0.0  # total memory
    weights: deque[Action] = field(default_factory=deque)  # the W that are ready
    actions: list[Action] = field(default_factory=list)
    free: float = 0.0  # when the last action ends

    def admits(self, microbatch: int, memory: float) -> bool:
        """Whether a forward fits and leaves the reserve for the oldest micro-batch that has forwards left.

        So the oldest unfinished micro-batch of the pipeline finds room on every rank: older ones are done, and younger
        ones leave enough.
        """
        if self.used + memory > self.limit or not self.reserve:
            return self.used + memory <= self.limit
        heads = (queue.left[0] for queue in self.queues if queue.left)
        oldest = min(action.microbatch for action in heads if action.kind is Kind.F)
        return microbatch == oldest or self.reserve + sum(self.held[oldest + 1 :]) + memory <= self.limit


class ListScheduler:
    """Makes schedules whose ranks never hold more activation memory than `limits[rank]`.

    With `split=False` backwards are whole (B) and there is no W. Raises ValueError if a rank cannot hold one whole
    micro-batch.
    """

    def __init__(self, shape: Shape, costs: Costs, limits: Sequence[float], split: bool = True) -> None:
        self._shape, self._costs, self._limits = shape, costs, limits
        self._backward = Kind.I if split else Kind.B
        self._rules = rules_of(shape, costs, (Kind.F, self._backward, Kind.W))
        stages_of = map(shape.placement.stages_of, range(shape.num_ranks))
        self._whole = [sum(sum(costs.activation[stage]) for stage in stages) for stages in stages_of]
        for rank, (whole, limit) in enumerate(zip(self._whole, limits, strict=True)):
            if whole > limit:
                raise ValueError(
                    f"one micro-batch takes {whole:g} of activation memory on rank {rank}, the limit is {limit:g}"
                )

    def plan(
        self,
        priority: Callable[[Action], float],
        patience: float = 0.0,
        hold: float = 0.0,
        orders: Sequence[Sequence[Action]] | None = None,
    ) -> Schedule | None:
        """A free rank takes the forward or backward with the smallest priority among those that can start and fit.

        No forward starts if a backward can start within `hold` times the duration of that forward. A rank that starts
        neither takes its oldest W, unless another action can start within `patience` times the duration of that W.
        Filling idle time with W under a limit is the idea of arXiv 2401.10241, section 3.1; here units are segments.

        With `orders` each rank keeps the order of F and B given there and only adds W. Returns None if the limits do
        not allow that order.
        """
        num_segments, rules, costs = self._shape.num_segments, self._rules, self._costs
        ranks, queues = self._start(orders)
        end_of = pending(self._shape)
        events: list[tuple[float, int]] = []  # (time, rank): when a rank may find an action to run

        def release(queue: _Queue) -> None:
            """Sets the time when the next action can start, if all its dependencies have started."""
            if queue.time < inf or not queue.left:
                return
            kind, stage, microbatch, segment = queue.left[0]
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
                action, queue.time = queue.left.popleft(), inf
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
        if any(queue.left for queue in queues.values()):
            return None
        return Schedule(self._shape, tuple(tuple(rank.actions) for rank in ranks))

    def _choice(
        self, rank: _Rank, now: float, priority: Callable[[Action], float], hold: float
    ) -> tuple[_Queue | None, float]:
        """The queue that a rank takes from now, or None, and the next time when it could take from another."""
        chosen, best, soonest, backward, duration = None, inf, inf, inf, 0.0
        for queue in rank.queues:
            if queue.time == inf:
                continue
            kind, stage, microbatch, segment = action = queue.left[0]
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

    def _start(self, orders: Sequence[Sequence[Action]] | None) -> tuple[list[_Rank], dict[tuple[Kind, int], _Queue]]:
        """The ranks before their first action, and the queue of each kind and stage."""
        shape, ranks = self._shape, []
        queues: dict[tuple[Kind, int], _Queue] = {}
        kinds = (Kind.F, shape.units), (self._backward, shape.units_backward)
        for rank, (limit, whole) in enumerate(zip(self._limits, self._whole, strict=True)):
            own = {
                (kind, stage): _Queue(rank, deque(Action(kind, stage, *unit) for unit in units))
                for stage, (kind, units) in product(shape.placement.stages_of(rank), kinds)
            }
            if orders is not None:
                order = (a if a.kind is Kind.F else a._replace(kind=self._backward) for a in orders[rank])
                own = dict.fromkeys(own, _Queue(rank, deque(order)))
            queues |= own
            reserve = whole if orders is None else 0.0
            ranks.append(_Rank(limit, reserve, [*dict.fromkeys(own.values())], [0.0] * shape.num_microbatches))
        return ranks, queues
