"""From the name of a schedule and its sizes to actions: for all ranks, or for one."""

from collections.abc import Sequence

from .action import Action
from .auto import auto
from .costs import Costs
from .families import FAMILIES
from .lowering import lower_rank
from .one_queue import nominal_starts
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
    ranks = (tuple(_of_rank(family, shape, rank)) for rank in range(shape.num_ranks))
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
    second for 64 ranks, 512 micro-batches, 16 segments and 2 model chunks. `auto` is an exception,
    and so is `one_queue` (see `lower`): they need all ranks, and every rank comes to the same plan.
    """
    if family == "auto" or one_queue:
        return program_of(build(family, shape, costs, limits), rank, one_queue)
    needed = [rank, *shape.placement.neighbours_of(rank)]
    orders = {each: tuple(_of_rank(family, shape, each)) for each in needed}
    return lower_rank(shape, orders, rank)


def program_of(schedule: Schedule, rank: int, one_queue: bool = False) -> list[Action]:
    """The lowered actions of one rank of a schedule."""
    starts = dict(enumerate(nominal_starts(schedule))) if one_queue else None
    return lower_rank(schedule.shape, dict(enumerate(schedule.ranks)), rank, starts)


def _of_rank(family: str, shape: Shape, rank: int) -> list[Action]:
    if family not in FAMILIES:
        raise ValueError(f"unknown schedule {family!r}; there are {', '.join(FAMILY_NAMES)}")
    return FAMILIES[family](shape, rank)
