"""The modular pipeline with layered gradient accumulation."""

from ..action import Action
from ..clock import by_clock, grouped, smallest_group
from ..schedule import Shape


def breadth_first(shape: Shape, rank: int) -> list[Action]:
    """All units of a model chunk before the next chunk (arXiv 2106.02679).

    So the gradients of a chunk are complete, and their reduction starts, while the other chunks
    still go backward, and its parameters are needed from its first forward on and not before: they
    are gathered while the chunk before it runs (REDUCE and GATHER of the lowered schedule).
    """
    # Groups so long that a chunk has ended on all ranks before the next one starts on any.
    tick = grouped(shape, group=shape.num_units + smallest_group(shape))
    return by_clock(shape, rank, tick, turn=tick(shape.num_units - 1, shape.num_stages - 1) + 1)
