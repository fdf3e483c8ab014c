"""The automatic scheduler: the best of several plans for given costs and memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from math import inf

from .action import Action, Kind
from .clock import first_turn, straight
from .cost_tables import Costs, peak_memory
from .dependencies import dependencies
from .families import FAMILIES
from .list_scheduling import ListScheduler, Priority
from .schedule import Schedule, Shape
from .timing import simulate

# In a step with more compute actions a plan takes seconds. Then the first plan within a share of the optimum is taken,
# and all plans together have at most so many actions, which takes about ten seconds.
_MANY_ACTIONS, _ACTIONS_OF_ALL_PLANS = 20_000, 1_000_000
_CLOSE = 1e-3

# For each plan: hop of the clock, or weight of the micro-batch; patience, hold (see ListScheduler.plan). Of 80 such
# plans, these together come closest to the best one, for random costs and for those of models.
_BY_TICK = ((1, 0.0, 0.0), (2, 0.5, 0.8), (2, 0.0, 0.5), (2, 0.0, 0.8), (2, 0.0, 1.0), (3, 0.5, 0.0))
_BY_PATH = ((0.25, 0.5, 0.5), (0.5, 0.5, 0.5), (1.0, 0.0, 0.0), (2.0, 0.0, 0.0))
_BY_ORDER = (0.0, 1.0)  # patience


def auto(
    shape: Shape,
    costs: Costs | None = None,
    limits: float | Sequence[float] | None = None,
    split: bool = True,
) -> Schedule:
    """The schedule with the smallest makespan among those found that keep the memory limits.

    `limits` is the activation memory that a rank may hold, in the unit of `costs.activation`, one number for all ranks
    or one for each; by default the largest peak of `1f1b` of the same shape. With `split=False` backwards stay whole.

    Every named family that fits is a candidate, so none of them is faster in simulation; the others come from list
    scheduling of units. Of equally short schedules it takes the one whose ranks are done soonest after their first
    action, then the one with the smallest peak; in a step of more than 20,000 actions the first within 0.1 % of
    `shortest_makespan`. Deterministic. Raises ValueError if a rank cannot hold one whole micro-batch or a cost table
    does not fit the shape.
    """
    costs = costs or Costs.uniform(shape)
    costs.check(shape)
    named = {name: family(shape).schedule() for name, family in FAMILIES.items()}
    if limits is None:
        limits = max(peak_memory(named["1f1b"], costs))
    if isinstance(limits, (int, float)):
        limits = [limits] * shape.num_ranks
    limits = [limit * (1 + 1e-9) for limit in limits]  # sums of floats are not exact
    num_actions = 3 * shape.num_stages * shape.num_units
    enough, most_plans = 0.0, None
    if num_actions > _MANY_ACTIONS:
        enough = (1 + _CLOSE) * shortest_makespan(shape, costs)
        most_plans = max(1, _ACTIONS_OF_ALL_PLANS // num_actions)
    plans = islice(filter(None, _plans(shape, costs, limits, split)), most_plans)

    best: Schedule | None = None
    best_score: tuple[float, ...] = (inf,)
    for schedule in chain(named.values(), plans):
        if not split and any(action.kind is Kind.I for actions in schedule.ranks for action in actions):
            continue
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


def shortest_makespan(shape: Shape, costs: Costs) -> float:
    """A lower bound: each rank waits for its first input, and then has all its work to do."""
    placement, repeats = shape.placement, Counter(segment for _, segment in shape.units)
    arrivals = [0.0]  # of the first segment at every stage
    for stage in range(shape.num_stages - 1):
        sent, needed = Action(Kind.F, stage, 0, 0), Action(Kind.F, stage + 1, 0, 0)
        arrivals.append(arrivals[-1] + costs.f[stage][0] + costs.delay(sent, needed, shape))
    whole = []
    for rank in range(shape.num_ranks):
        stages = placement.stages_of(rank)
        work = (
            n * (costs.f[each][s] + costs.i[each][s] + costs.w[each][s]) for each in stages for s, n in repeats.items()
        )
        whole.append(arrivals[min(stages)] + sum(work))
    return max(whole)


def _plans(shape: Shape, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Schedule | None]:
    yield from _list_schedules(shape, costs, limits, split)
    if split and costs.kept != costs.activation:
        # Weight gradients that count in full run earlier, which is sometimes better.
        yield from _list_schedules(shape, replace(costs, kept=costs.activation), limits, split)


def _list_schedules(shape: Shape, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Schedule | None]:
    scheduler = ListScheduler(shape, costs, limits, split)
    by_tick = {hop: _by_tick(shape, hop) for hop, _, _ in _BY_TICK}
    # The order of 1F1B, with W only where a rank waits.
    orders = FAMILIES["1f1b"](shape).schedule().ranks
    for patience in _BY_ORDER if split else _BY_ORDER[:1]:
        yield scheduler.plan(by_tick[1], patience, orders=orders)
    # A short hop starts backwards early and holds little, a long one hides unequal costs better.
    for hop, patience, hold in _BY_TICK:
        yield scheduler.plan(by_tick[hop], patience, hold)
    paths = _longest_paths(shape, costs)
    for weight, patience, hold in _BY_PATH:
        yield scheduler.plan(_by_path(shape, paths, weight), patience, hold)


def _by_tick(shape: Shape, hop: int) -> Priority:
    """The order of a clock."""
    tick, last_stage = straight(shape, period=2, hop=hop), shape.num_stages - 1
    turn = first_turn(shape, tick)

    def priority(action: Action, position: int) -> float:
        is_forward, stage = action.kind is Kind.F, action.stage
        return tick(position, stage) if is_forward else turn + tick(position, last_stage - stage)

    return priority


# By whether it is a forward, stage and segment: the time from the start of an F or B to the end of all that needs it.
_Paths = dict[tuple[bool, int, int], float]


def _by_path(shape: Shape, paths: _Paths, weight: float) -> Priority:
    """The longest path to the end goes first; over all micro-batches `weight` longest paths are added."""
    later = weight * max(paths.values()) / shape.num_microbatches

    def priority(action: Action, position: int) -> float:
        kind, stage, microbatch, segment = action
        return later * microbatch - paths[kind is Kind.F, stage, segment]

    return priority


def _longest_paths(shape: Shape, costs: Costs) -> _Paths:
    shape = shape.filled
    units = list(product(range(shape.num_stages), range(shape.num_segments)))
    after = {Action(Kind.B, stage, 0, segment): costs.w[stage][segment] for stage, segment in units}
    paths: _Paths = {}
    # What needs an action comes before it.
    in_order = [*product([Kind.B], units), *product([Kind.F], reversed(units))]
    for kind, (stage, segment) in in_order:
        action, table = Action(kind, stage, 0, segment), costs.f if kind is Kind.F else costs.i
        path = paths[kind is Kind.F, stage, segment] = after[action] + table[stage][segment]
        for needed in dependencies(action, shape):
            after[needed] = max(after.get(needed, 0.0), costs.delay(needed, action, shape) + path)
    return paths
