"""The automatic scheduler: the best of several plans for given costs and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isclose

from .action import Kind
from .clock import Tick, straight
from .cost_tables import Costs, peak_memory
from .families import FAMILIES
from .list_scheduling import ListScheduler
from .schedule import Schedule, Shape
from .timing import simulate


def auto(
    shape: Shape,
    costs: Costs | None = None,
    limits: float | Sequence[float] | None = None,
    split: bool = True,
) -> Schedule:
    """The schedule of the smallest makespan among those found that hold the memory limits.

    `limits` is the activation memory that a rank may hold, in the unit of `costs.activation`, one
    number for all ranks or one for each; if not given it is the largest peak of `1f1b` of the same
    shape. With `split=False` no backward is split, so the result has no I and W.

    Every named family that fits is among the candidates, so none of them is faster in simulation.
    The others come from list scheduling at the granularity of units. Of equally short ones it is
    that of the smallest peak, and of these the one whose ranks are done soonest after their first
    action. Deterministic. Raises ValueError if a rank cannot hold one whole micro-batch or a cost
    table does not fit the shape.
    """
    costs = costs or Costs.uniform(shape)
    costs.check(shape)
    named = {name: family(shape).schedule() for name, family in FAMILIES.items()}
    if limits is None:
        limits = max(peak_memory(named["1f1b"], costs))
    if isinstance(limits, (int, float)):
        limits = [limits] * shape.num_ranks
    limits = [limit * (1 + 1e-9) for limit in limits]  # sums of floats are not exact

    best: Schedule | None = None
    best_score = inf, inf, inf
    for schedule in (*named.values(), *_plans(shape, costs, limits, split)):
        if not split and any(action.kind is Kind.I for actions in schedule.ranks for action in actions):
            continue
        peaks = peak_memory(schedule, costs)
        if any(peak > limit for peak, limit in zip(peaks, limits, strict=True)):
            continue
        timeline = simulate(schedule, costs)
        score = timeline.makespan, max(peaks), timeline.longest_stretch
        if _is_less(score, best_score):
            best, best_score = schedule, score
    assert best is not None, "list scheduling keeps the limits"
    return best


def _is_less(score: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the first number in which they differ is smaller; sums of floats are not exact."""
    for a, b in zip(score, other, strict=True):
        if not isclose(a, b):
            return a < b
    return False


def _plans(shape: Shape, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Schedule]:
    yield from _list_schedules(shape, costs, limits, split)
    if split and costs.kept != costs.activation:
        # Weight gradients that count in full run earlier, which is sometimes better.
        yield from _list_schedules(shape, replace(costs, kept=costs.activation), limits, split)


def _by_tick(tick: Tick, turn: int, last_stage: int, kind: Kind, position: int, stage: int) -> int:
    return tick(position, stage) if kind is Kind.F else turn + tick(position, last_stage - stage)


def _list_schedules(shape: Shape, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Schedule]:
    scheduler = ListScheduler(shape, costs, limits, split)
    last_stage = shape.num_stages - 1
    patiences = (0.0, 0.5) if split else (0.0,)

    # A short hop starts backwards early and holds little, a long one hides unequal costs better.
    for hop in (1, 2, 3):
        tick = straight(shape, period=2, hop=hop)
        turn = tick(shape.num_segments - 1, last_stage) + 1

        for patience in patiences:
            yield scheduler.by_priority(partial(_by_tick, tick, turn, last_stage), patience)
        # Forwards that give way to backwards let the first rank go on early.
        if hop == 2:
            for hold in (0.5, 0.8, 1.0):
                yield scheduler.by_priority(partial(_by_tick, tick, turn, last_stage), hold=hold)

    # The order of 1F1B, with W only where a rank waits.
    orders = FAMILIES["1f1b"](shape).schedule().ranks
    for patience in patiences:
        schedule = scheduler.by_order(orders, patience)
        if schedule is not None:
            yield schedule
