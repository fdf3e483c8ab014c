"""The automatic scheduler: the best of several plans for given costs and memory, most of them by list scheduling."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain, groupby, islice, product
from math import inf

from .action import Action
from .cost_tables import Costs, memory_changes, peak_memory
from .families import FAMILIES
from .kinds import Kind
from .schedule import Schedule, Shape
from .timeline import Timeline
from .timing import pending, rules_of, simulate

# In a step with more compute actions, a plan takes seconds. The search then stops at the first plan close to the
# optimum, and limits the actions of all plans together, to about ten seconds.
_MANY_ACTIONS = 20_000
_ACTIONS_OF_ALL_PLANS = 1_000_000
_CLOSE = 1e-3

# For each plan, the distance of micro-batches, relative to the busiest rank's time for one, then patience and hold (see
# ListScheduler.plan). For random costs and those of models, 60 such plans are hardly better than these.
_APART = (0.35, 0.5, 1.0)
_WAITS = ((0.0, 0.5), (0.0, 0.8), (0.0, 1.0), (0.5, 0.5))


def auto(
    shape: Shape,
    costs: Costs | None = None,
    limits: float | Sequence[float] | None = None,
    split: bool = True,
) -> Schedule:
    """The schedule with the smallest makespan among those found that keep the memory limits; deterministic.

    `limits` is the activation memory of a rank in the unit of `costs.activation`, one number for all ranks or one for
    each; by default the largest peak of `1f1b`. With `split=False` backwards stay whole. Every named family that fits
    is a candidate. Ties go to the smallest `longest_stretch`, then to the smallest peak. In a step of more than 20,000
    actions the first schedule within 0.1 % of `shortest_makespan` is taken. Raises ValueError if a rank cannot hold one
    whole micro-batch or a cost table does not fit the shape.
    """
    costs = costs or Costs.uniform(shape)
    costs.check(shape)
    clocks = [family(shape) for family in FAMILIES.values()]
    named = [clock.schedule() for clock in clocks if split or clock.lag is None]
    usual = FAMILIES["1f1b"](shape).schedule()
    if limits is None:
        limits = max(peak_memory(usual, costs))
    if isinstance(limits, (int, float)):
        limits = [limits] * shape.num_ranks
    limits = [limit * (1 + 1e-9) for limit in limits]  # sums of floats are not exact
    num_actions = 3 * shape.num_stages * shape.num_units
    enough = 0.0
    most_plans = None
    if num_actions > _MANY_ACTIONS:
        enough = (1 + _CLOSE) * shortest_makespan(simulate(usual, costs))
        most_plans = max(1, _ACTIONS_OF_ALL_PLANS // num_actions)
    plans = islice(filter(None, _plans(shape, costs, limits, split)), most_plans)

    best: Schedule | None = None
    best_score: tuple[float, ...] = (inf,)
    for schedule in chain(named, plans):
        peaks = peak_memory(schedule, costs)
        if any(peak > limit for peak, limit in zip(peaks, limits, strict=True)):
            continue
        timeline = simulate(schedule, costs)
        # Sums of floats are not exact.
        score = tuple(float(f"{figure:.9g}") for figure in (timeline.makespan, timeline.longest_stretch, max(peaks)))
        if score < best_score:
            best = schedule
            best_score = score
        if best_score[0] <= enough:
            break
    assert best is not None, "list scheduling keeps the limits"
    return best


def shortest_makespan(timeline: Timeline) -> float:
    """A lower bound for all schedules of this shape and costs. In `timeline`, ranks start at their first input."""
    return max(spans[0].start + timeline.busy(rank) for rank, spans in enumerate(timeline.ranks))


def _plans(shape: Shape, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Schedule | None]:
    scheduler = ListScheduler(shape, costs, limits, split)
    for patience in (0.0, 1.0) if split else (0.0,):  # the order of 1F1B, with W only where a rank waits
        yield scheduler.schedule_by(None, patience)

    # Order units as if micro-batches started one after another and each ran as fast as alone. A micro-batch with fewer
    # segments starts as if its first segments were missing.
    alone = simulate(FAMILIES["gpipe"](replace(shape, num_microbatches=1, unequal=())).schedule(), costs)
    starts = {}
    for spans in alone.ranks:
        for (kind, stage, _, segment), start, _ in spans:
            starts[kind, stage, segment] = start
    busiest = max(map(alone.busy, range(shape.num_ranks)))

    for apart, waits in product(_APART, _WAITS):

        def priority(action: Action, interval: float = apart * busiest / shape.num_segments) -> float:
            kind, stage, microbatch, segment = action
            missing = shape.num_segments - shape.segments_of(microbatch)
            begin = interval * (shape.first_units[microbatch] - missing)
            if kind is Kind.F:
                return begin + starts[kind, stage, segment + missing]
            return begin + starts[Kind.B, stage, segment]

        yield scheduler.schedule_by(priority, *waits)


@dataclass
class _Queue:
    """Actions of a rank that run in this order: the forwards or backwards of a stage, or all in the order of 1F1B."""

    rank: int
    left: deque[Action]
    time: float = inf  # earliest start of the next action; inf until its dependencies have started


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
    free: float = 0.0  # when the last action ends

    def admits(self, microbatch: int, memory: float) -> bool:
        """Whether a forward of a micro-batch fits and, unless all actions are in one order, leaves room for all of the
        oldest micro-batch that has forwards left. So the oldest one never waits for memory: those before it have ended,
        and those after it have left it room."""
        if self.used + memory > self.limit or len(self.queues) == 1:
            return self.used + memory <= self.limit
        heads = (queue.left[0] for queue in self.queues if queue.left)
        oldest = min(action.microbatch for action in heads if action.kind is Kind.F)
        return microbatch == oldest or self.whole + sum(self.held[oldest + 1 :]) + memory <= self.limit


def _as_kind(action: Action, backward: Kind) -> Action:
    """A forward as it is, a backward as one of this kind."""
    return action if action.kind is Kind.F else action._replace(kind=backward)


def _lines(order: Sequence[Action]) -> list[list[Action]]:
    """The forwards and the backwards of each stage, in their order."""

    def line_of(action: Action) -> tuple[int, bool]:
        return action.stage, action.kind is not Kind.F

    return [list(line) for _, line in groupby(sorted(order, key=line_of), line_of)]


class ListScheduler:
    """Simulates the pipeline in time; each free rank picks its next action. It never holds more activation memory than
    its limit. Raises ValueError if it cannot hold one whole micro-batch."""

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
        costs = self._costs
        changes = memory_changes(costs)
        ranks = self._idle_ranks(self._in_order if priority is None else self._free)
        queues: dict[tuple[Kind, int], _Queue] = {}  # by kind and stage
        for rank in ranks:
            for line in rank.queues:
                queues |= {(action.kind, action.stage): line for action in line.left}
        end_of = pending(self._shape)
        events: list[tuple[float, int]] = []  # (time, rank): when a rank may find an action to run

        def release(queue: _Queue) -> None:
            """Set the time when the next action can start, if all its dependencies have started."""
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
                action = queue.left.popleft()
                queue.time = inf
            elif rank.weights and soonest >= now + patience * costs.w[rank.weights[0].stage][rank.weights[0].segment]:
                action = rank.weights.popleft()
            else:
                continue
            kind, stage, microbatch, segment = action
            code, duration, _ = rules[kind][stage][segment]
            rank.free = now + duration
            end_of[code + microbatch * num_segments] = rank.free
            heappush(events, (rank.free, index))
            rank.actions.append(action)
            memory = changes[kind][stage][segment]
            rank.used += memory
            rank.held[microbatch] += memory
            if kind is Kind.I:
                rank.weights.append(action._replace(kind=Kind.W))
            # Its dependents are at its own stage and the two neighbours.
            for follower in product(self._kinds, (stage - 1, stage, stage + 1)):
                if follower in queues:
                    release(queues[follower])
        if any(queue.left for queue in queues.values()):
            return None
        return Schedule(self._shape, tuple(tuple(rank.actions) for rank in ranks))

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
        """The queue that a rank takes from now, or None, and the next time when it could take from another."""
        chosen = None
        best = inf  # the smallest priority among those that can start now
        soonest = inf  # the first moment when another could start
        backward = inf  # the first moment when a backward could
        duration = 0.0  # of the chosen one if it is a forward, which may be held back for a backward
        for queue in rank.queues:
            if queue.time == inf:
                continue
            action = queue.left[0]
            kind, stage, microbatch, segment = action
            if kind is Kind.F and not rank.admits(microbatch, self._costs.activation[stage][segment]):
                continue
            if queue.time > now:
                soonest = min(soonest, queue.time)
                if kind is not Kind.F:
                    backward = min(backward, queue.time)
                continue
            value = priority(action) if priority else 0.0
            if value < best:
                chosen = queue
                best = value
                duration = self._costs.f[stage][segment] if kind is Kind.F else 0.0
        if chosen is not None and backward < now + hold * duration:
            return None, backward
        return chosen, soonest
