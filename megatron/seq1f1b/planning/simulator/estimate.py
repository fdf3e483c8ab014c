"""A step of any number of micro-batches, from short steps where there are many."""

from collections.abc import Callable, Sequence
from math import ceil, isclose

from ...schedule import Shape

# Beyond this many actions a step is predicted from short ones.
_MOST_ACTIONS = 60_000
# Groups of micro-batches after which the steady state is usually reached.
_SHORT_STEP = 6
# Relative difference of times that are as good as equal.
_EQUAL = 1e-5

# Takes a number of micro-batches, and gives times and memory of a step.
Measured = Callable[[int], Sequence[float]]


def extended(shape: Shape, measured: Measured) -> Sequence[float]:
    """What `measured` gives for a step of this shape; from short steps that end alike, to within 1 %, if it has very
    many actions.

    In its steady state a schedule repeats itself with every group of micro-batches that occupies all ranks, so that
    time, and memory where it grows at all, grow by as much with each. Two steps give that growth; where it does not
    lead to a third one, twice as long, that state comes later, and longer steps are taken.
    """
    group = ceil(shape.num_ranks / shape.num_segments)
    groups, rest = divmod(shape.num_microbatches, group)
    short, is_long = _SHORT_STEP, 2 * shape.num_units * shape.num_stages > _MOST_ACTIONS
    while is_long and groups > 2 * short:
        first, second, third = (measured(count * group + rest) for count in (short, short + 1, 2 * short))
        growth = [b - a for a, b in zip(first, second, strict=True)]
        if all(isclose(a + short * each, b, rel_tol=_EQUAL) for a, b, each in zip(first, third, growth, strict=True)):
            return [value + (groups - 2 * short) * each for value, each in zip(third, growth, strict=True)]
        short *= 2
    return measured(shape.num_microbatches)
