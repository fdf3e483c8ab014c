"""What a rank of a schedule holds when its backwards begin, and how often the first one holds as much, without orders.

Tested in planner/test_search.py by test_ranks_hold_these_units.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache, partial
from math import ceil

from ..schedule import Clock, Shape, clock_of
from ..schedule.clock import smallest_group


@lru_cache(maxsize=1 << 14)
def units_at_first_backward(family: str, shape: Shape, has_pairs: bool, rank: int = 0) -> tuple[int, ...]:
    """The units that a rank holds during its first backward, by chunk: those of the forwards before it. A forward
    beside it does not count."""
    clock = clock_of(family, shape, has_pairs)
    stages = shape.placement.stages_of(rank)
    first_backward = clock.turn + min(clock.tick(0, shape.num_stages - 1 - stage) for stage in stages)
    before = first_backward - 1 if has_pairs else first_backward
    units = range(shape.num_units)
    return tuple(bisect_left(units, before, key=partial(_tick_of_unit, clock, stage)) for stage in stages)


def of_first_units(segments: Sequence[float], number: int) -> float:
    """The seconds or bytes of the first units of a stage, from those of the segments of a micro-batch."""
    microbatches, more = divmod(number, len(segments))
    return microbatches * sum(segments) + sum(segments[:more])


def _tick_of_unit(clock: Clock, stage: int, unit: int) -> int:
    return clock.tick(unit, stage)


@lru_cache(maxsize=1 << 14)
def backwards_like_the_first(shape: Shape, has_pairs: bool) -> range:
    """Numbers of backwards of the first rank in 1F1B during which it holds as much as during the first, but none of the
    units that it holds during another of them.

    Looped chunks take turns of G units, so all repeats itself after C * G backwards. With U units at the first backward
    a unit is held, from the backward after its forward, for at most U more backwards than its own backward has before
    it in its turns: (C - 1) * G if its chunk is the first, and k - 1 if its segment is."""
    held = sum(units_at_first_backward("1f1b", shape, has_pairs))
    turn = shape.num_segments if shape.num_chunks == 1 else smallest_group(shape)
    period = shape.num_chunks * turn
    longest = held + (shape.num_chunks - 1) * turn + shape.num_segments
    whole_turns = shape.num_units // turn
    last = whole_turns * period - held  # all forwards up to there are in whole turns
    return range(0, max(0, last) + 1, ceil(longest / period) * period)
