"""From the name of a schedule and its sizes to actions: for all ranks, or for one."""

from collections.abc import Sequence

from .action import Action
from .auto import auto
from .costs import Costs
from .families import FAMILIES
from .lowering import lower_rank
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
) -> list[Action]:
    """All that one rank does in a step: its lowered actions. Raises ValueError as `build` does.

    Needs the compute orders of this rank and of its neighbours only, so it takes well under a
    second for 64 ranks, 512 micro-batches, 16 segments and 2 model chunks. `auto` is the exception:
    it plans all ranks together, and every rank comes to the same plan.
    """
    needed = [rank, *shape.placement.neighbours_of(rank)]
    if family == "auto":
        schedule = auto(shape, costs, limits)
        orders = {each: schedule.ranks[each] for each in needed}
    else:
        orders = {each: _of_rank(family, shape, each) for each in needed}
    return lower_rank(shape, orders, rank)


def _of_rank(family: str, shape: Shape, rank: int) -> list[Action]:
    if family not in FAMILIES:
        raise ValueError(f"unknown schedule {family!r}; there are {', '.join(FAMILY_NAMES)}")
    return FAMILIES[family](shape, rank)
