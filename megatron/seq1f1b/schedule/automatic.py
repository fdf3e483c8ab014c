"""The automatic scheduler: the best of several plans for given costs and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from math import inf

from .action import Action, Kind
from .cost_tables import Costs, peak_memory
from .families import FAMILIES
from .list_scheduling import ListScheduler
from .schedule import Schedule, Shape
from .timeline import Timeline
from .timing import simulate

# In a step with more compute actions, a plan takes seconds. The search then stops at the first plan close to the
# optimum, and limits the actions of all plans together, to about ten seconds.
_MANY_ACTIONS, _ACTIONS_OF_ALL_PLANS = 20_000, 1_000_000
_CLOSE = 1e-3

# For each plan, the distance of micro-batches, relative to the busiest rank's time for one, then patience and hold (see
# ListScheduler.plan). For random costs and those of models, 60 such plans are hardly better than these.
_APART, _WAITS = (0.35, 0.5, 1.0), ((0.0, 0.5), (0.0, 0.8), (0.0, 1.0), (0.5, 0.5))


def auto(
    shape: Shape,
    costs: Costs | None = None,
    limits: float | Sequence[float] | None = None,
    split: bool = True,
) -> Schedule:
    """The schedule with the smallest makespan among those found that keep the memory limits.

    `limits` is the activation memory that a rank may hold, in the unit of `costs.activation`, one number for all ranks
    or one for each; by default the largest peak of `1f1b` of the same shape. With `split=False` backwards stay whole.

    Every named family that fits is a candidate, so none of them is faster in simulation; the other candidates come from
    list scheduling of units. Ties go to the schedule with the smallest `longest_stretch`, then to the smallest peak. In
    a step of more than 20,000 actions the first schedule within 0.1 % of `shortest_makespan` is taken. Deterministic.
    Raises ValueError if a rank cannot hold one whole micro-batch or a cost table does not fit the shape.
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
    enough, most_plans = 0.0, None
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
        score = tuple(float(f"{each:.9g}") for each in (timeline.makespan, timeline.longest_stretch, max(peaks)))
        if score < best_score:
            best, best_score = schedule, score
        if best_score[0] <= enough:
            break
    assert best is not None, "list scheduling keeps the limits"
    return best


def shortest_makespan(timeline: Timeline) -> float:
    """A lower bound for all schedules of this shape and costs, from one whose ranks start at their first input."""
    return max(spans[0].start + timeline.busy(rank) for rank, spans in enumerate(timeline.ranks))


def _plans(shape: Shape, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Schedule | None]:
    scheduler = ListScheduler(shape, costs, limits, split)
    for patience in (0.0, 1.0) if split else (0.0,):  # the order of 1F1B, with W only where a rank waits
        yield scheduler.plan(lambda _: 0.0, patience, orders=FAMILIES["1f1b"](shape).schedule().ranks)

    # Order units as if micro-batches started one after another and each ran as fast as alone. A micro-batch with fewer
    # segments starts as if its first segments were missing.
    alone = simulate(FAMILIES["gpipe"](replace(shape, num_microbatches=1, unequal=())).schedule(), costs)
    starts = {(kind, stage, segment): time for spans in alone.ranks for (kind, stage, _, segment), time, _ in spans}
    busiest = max(map(alone.busy, range(shape.num_ranks)))

    for apart, waits in product(_APART, _WAITS):

        def priority(action: Action, interval: float = apart * busiest / shape.num_segments) -> float:
            kind, stage, microbatch, segment = action
            missing = shape.num_segments - shape.segments_of(microbatch)
            begin = interval * (shape.first_units[microbatch] - missing)
            if kind is Kind.F:
                return begin + starts[kind, stage, segment + missing]
            return begin + starts[Kind.B, stage, segment]

        yield scheduler.plan(priority, *waits)
