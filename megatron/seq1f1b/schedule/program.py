"""All that one rank does in a step, built without building the other ranks."""

from .action import Action
from .families import compute_order
from .lowering import lower_rank
from .schedule import Shape


def program(family: str, shape: Shape, rank: int) -> list[Action]:
    """The lowered actions of one rank. Raises ValueError for an unknown family.

    Needs the compute orders of this rank and of its neighbours only, so it takes well under a
    second for 64 ranks, 512 micro-batches, 16 segments and 2 model chunks.
    """
    ranks = [rank, *shape.placement.neighbours_of(rank)]
    orders = {each: compute_order(family, shape, each) for each in ranks}
    return lower_rank(shape, orders, rank)
