"""The named schedules. Each is a function `(shape, rank) -> list[Action]` of compute actions."""

from collections.abc import Callable

from ..action import Action
from ..schedule import Schedule, Shape
from .breadth_first import breadth_first
from .gpipe import gpipe
from .one_f_one_b import one_f_one_b
from .zb_h1 import zb_h1

Family = Callable[[Shape, int], list[Action]]

# Read-only by convention: the value of --pipeline-schedule and what builds a rank of it.
FAMILIES: dict[str, Family] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "breadth-first": breadth_first,
}


def compute_order(family: str, shape: Shape, rank: int) -> list[Action]:
    """The compute actions of one rank. Raises ValueError for an unknown family."""
    if family not in FAMILIES:
        raise ValueError(f"unknown schedule {family!r}; there are {', '.join(FAMILIES)}")
    return FAMILIES[family](shape, rank)


def build(family: str, shape: Shape) -> Schedule:
    """The compute actions of all ranks. Raises ValueError for an unknown family."""
    ranks = (tuple(compute_order(family, shape, rank)) for rank in range(shape.num_ranks))
    return Schedule(shape, tuple(ranks))
