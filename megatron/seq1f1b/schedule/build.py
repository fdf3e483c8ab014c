"""From the name of a schedule and its sizes to actions: for all ranks, or for one."""

from collections.abc import Sequence

from .action import Action
from .auto import auto
from .clock import Clock
from .costs import Costs
from .families import FAMILIES
from .lowering import lower_rank
from .one_queue import nominal_times
from .schedule import Schedule, Shape

# The values of --pipeline-schedule.
FAMILY_NAMES = (*FAMILIES, "auto")


def build(
    family: str,
    shape: Shape,
    costs: Costs | None = None,
    limits: float | Sequence[float] | None = None,
) -> Schedule:
    """The compute actions of all ranks. Raises ValueError for an unknown family.

    Only `auto` looks at the costs and at the limits of activation memory, see there.
    """
    if family == "auto":
        return auto(shape, costs, limits)
    clock = clock_of(family, shape)
    ranks = (tuple(clock.order(rank).actions) for rank in range(shape.num_ranks))
    return Schedule(shape, tuple(ranks))


def program(
    family: str,
    shape: Shape,
    rank: int,
    costs: Costs | None = None,
    limits: float | Sequence[float] | None = None,
    one_queue: bool = False,
) -> list[Action]:
    """All that one rank does in a step: its lowered actions. Raises ValueError as `build` does.

    Needs the compute orders of this rank and of its neighbours only, so it takes well under a
    second for 64 ranks, 512 micro-batches, 16 segments and 2 model chunks. `auto` is an exception:
    every rank plans all of it and comes to the same plan. With `one_queue` it does not hang where
    each rank has one hardware queue.
    """
    if family == "auto":
        return program_of(auto(shape, costs, limits), rank, one_queue)
    clock = clock_of(family, shape)
    orders = {each: clock.order(each) for each in (rank, *shape.placement.neighbours_of(rank))}
    actions = {each: order.actions for each, order in orders.items()}
    return lower_rank(
        shape, actions, rank, {each: order.ticks for each, order in orders.items()} if one_queue else None
    )


def program_of(schedule: Schedule, rank: int, one_queue: bool = False) -> list[Action]:
    """The lowered actions of one rank of a schedule."""
    times = nominal_times(schedule) if one_queue else None
    return lower_rank(schedule.shape, dict(enumerate(schedule.ranks)), rank, times)


def clock_of(family: str, shape: Shape) -> Clock:
    """The clock of a named schedule. Raises ValueError for an unknown family."""
    if family not in FAMILIES:
        raise ValueError(f"unknown schedule {family!r}; there are {', '.join(FAMILY_NAMES)}")
    return FAMILIES[family](shape)
