"""The modular pipeline with layered gradient accumulation."""

from ..clock import Clock, grouped, smallest_group
from ..schedule import Shape


def breadth_first(shape: Shape) -> Clock:
    """All units of a model chunk before the next chunk (arXiv 2106.02679).

    So the gradients of a chunk are complete, and their reduction starts, while the other chunks
    still go backward, and its parameters are needed from its first forward on and not before: they
    are gathered while the chunk before it runs (REDUCE and GATHER of the lowered schedule).
    """
    units, fewest = shape.num_units, smallest_group(shape)
    # In a V the rank that ends a chunk last starts the next one first.
    tick = grouped(shape, group=units + fewest if shape.placement.turns else max(units, fewest))
    return Clock(shape, tick, turn=tick(shape.num_units - 1, shape.num_stages - 1) + 1)
