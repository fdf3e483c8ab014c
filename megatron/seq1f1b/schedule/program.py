"""All that one rank does in a step, built without building the other ranks."""

from .action import CHUNK_KINDS, Action, Kind
from .families import compute_order
from .lowering import lower_rank
from .schedule import Shape


def program(family: str, shape: Shape, rank: int, forward_only: bool = False) -> list[Action]:
    """The lowered actions of one rank. Raises ValueError for an unknown family.

    Needs the compute orders of this rank and of its neighbours only, so it takes well under a
    second for 64 ranks, 512 micro-batches, 16 segments and 2 model chunks.

    With `forward_only`, for evaluation, what is left of it is the forwards and their messages: no
    optimizer step comes before or after, so no parameters are gathered and no gradients reduced.
    """
    ranks = [rank, *shape.placement.neighbours_of(rank)]
    orders = {each: compute_order(family, shape, each) for each in ranks}
    if not forward_only:
        return lower_rank(shape, orders, rank)
    forwards = {each: [action for action in order if action.kind is Kind.F] for each, order in orders.items()}
    return [action for action in lower_rank(shape, forwards, rank) if action.kind not in CHUNK_KINDS]
