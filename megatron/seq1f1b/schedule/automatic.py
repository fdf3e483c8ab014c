"""The automatic scheduler: the best of several schedules by costs and memory, most of them from list scheduling."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from math import inf

from .action import Action
from .cost_tables import Costs, peak_memory
from .families import FAMILIES
from .kinds import Kind
from .list_scheduling import ListScheduler
from .schedule import Schedule, Shape
from .timeline import Timeline
from .timing import simulate

# In a step with more compute actions, a plan takes seconds. The search then stops at the first plan close to the
# optimum, and limits the actions of all plans together, to about fifteen seconds.
_MANY_ACTIONS = 20_000
_ACTIONS_OF_ALL_PLANS = 1_000_000
_CLOSE = 1e-3

# The plans to try: between two micro-batches passes one of these shares of the time that the busiest rank takes for a
# micro-batch, and ranks wait by one of these pairs of patience and hold (see `ListScheduler.schedule_by`). For random
# costs and those of models, 60 such plans are hardly better than these.
_INTERVALS = (0.35, 0.5, 1.0)
_PATIENCE_AND_HOLD = ((0.0, 0.5), (0.0, 0.8), (0.0, 1.0), (0.5, 0.5))

Start = tuple[Kind, int, int]  # of a forward or backward: its kind, stage and segment


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
    one_f_one_b = FAMILIES["1f1b"](shape).schedule()
    if limits is None:
        limits = max(peak_memory(one_f_one_b, costs))
    if isinstance(limits, (int, float)):
        limits = [limits] * shape.num_ranks
    limits = [limit * (1 + 1e-9) for limit in limits]  # sums of floats are not exact

    num_actions = 3 * shape.num_stages * shape.num_units
    short_enough = 0.0
    most_plans = None
    if num_actions > _MANY_ACTIONS:
        short_enough = (1 + _CLOSE) * shortest_makespan(simulate(one_f_one_b, costs))
        most_plans = max(1, _ACTIONS_OF_ALL_PLANS // num_actions)
    clocks = [family(shape) for family in FAMILIES.values()]
    named = [clock.schedule() for clock in clocks if split or clock.lag is None]
    planned = islice(filter(None, _plans(shape, costs, limits, split)), most_plans)
    return _best(chain(named, planned), costs, limits, short_enough)


def shortest_makespan(timeline: Timeline) -> float:
    """A lower bound for all schedules of this shape and costs. In `timeline`, ranks start at their first input."""
    return max(spans[0].start + timeline.busy(rank) for rank, spans in enumerate(timeline.ranks))


def _best(candidates: Iterable[Schedule], costs: Costs, limits: Sequence[float], short_enough: float) -> Schedule:
    """The best schedule within the memory limits of ranks. The search ends at a makespan that is `short_enough`."""
    best: Schedule | None = None
    best_score: tuple[float, ...] = (inf,)
    for schedule in candidates:
        peaks = peak_memory(schedule, costs)
        if any(peak > limit for peak, limit in zip(peaks, limits, strict=True)):
            continue
        timeline = simulate(schedule, costs)
        # Sums of floats are not exact.
        score = tuple(float(f"{figure:.9g}") for figure in (timeline.makespan, timeline.longest_stretch, max(peaks)))
        if score < best_score:
            best = schedule
            best_score = score
        if best_score[0] <= short_enough:
            break
    assert best is not None, "list scheduling keeps the limits"
    return best


def _plans(shape: Shape, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Schedule | None]:
    """Schedules by list scheduling; None in place of one that the limits do not allow."""
    scheduler = ListScheduler(shape, costs, limits, split)
    # The order of 1F1B, with W only where a rank waits.
    yield scheduler.schedule_by(None)
    if split:
        yield scheduler.schedule_by(None, patience=1.0)

    one_microbatch = replace(shape, num_microbatches=1, unequal=())
    timeline = simulate(FAMILIES["gpipe"](one_microbatch).schedule(), costs)
    starts: dict[Start, float] = {}
    for spans in timeline.ranks:
        for (kind, stage, _, segment), start, _ in spans:
            starts[kind, stage, segment] = start
    seconds_of_microbatch = max(map(timeline.busy, range(shape.num_ranks)))

    for interval, (patience, hold) in product(_INTERVALS, _PATIENCE_AND_HOLD):
        seconds_of_unit = interval * seconds_of_microbatch / shape.num_segments
        yield scheduler.schedule_by(_by_start(shape, starts, seconds_of_unit), patience, hold)


def _by_start(shape: Shape, starts: Mapping[Start, float], seconds_of_unit: float) -> Callable[[Action], float]:
    """A priority that orders units as if micro-batches began one after another, `seconds_of_unit` for each unit of the
    earlier ones, and each then had the pipeline to itself, with the `starts` of its actions. A micro-batch with fewer
    segments begins as if its first segments were missing."""

    def priority(action: Action) -> float:
        kind, stage, microbatch, segment = action
        missing = shape.num_segments - shape.segments_of(microbatch)
        begin = seconds_of_unit * (shape.first_units[microbatch] - missing)
        if kind is Kind.F:
            return begin + starts[kind, stage, segment + missing]
        return begin + starts[Kind.B, stage, segment]

    return priority
