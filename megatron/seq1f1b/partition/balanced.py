"""Segments of equal cost on the slowest stage.

A pipeline runs at the pace of its slowest stage, and a unit waits for the one before it, so it is that stage's
forward-plus-backward time that should be the same for every segment. The idea is the computation-wise partition of
Seq1F1B (arXiv 2406.03488, section 3.4); what differs is the cost: of one stage and not of the whole model, with the
backward, and by the kind of every layer.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from .cut_positions import check_length, tile
from .segment_time import SegmentTime

# Halvings of the interval that holds the common time: to well below the time of one token.
_BISECTIONS = 50


def balanced(
    sequence_length: int, num_segments: int, time: SegmentTime, multiple_of: int = 1, min_length: int = 1
) -> tuple[int, ...]:
    """Cut into segments of equal `time(start, end)`; lengths in tokens, first to last.

    Lengths are multiples of `multiple_of`, and of up to 128 tokens where that does not spoil the balance; the first
    segment, whose tokens are the cheapest, takes what is left over. No segment is shorter than `min_length`, unless
    that many are too many for the sequence. Raises ParameterError if the sequence is too short for so many segments, or
    no multiple.
    """
    check_length(sequence_length, num_segments, multiple_of)
    step = tile(sequence_length, num_segments, multiple_of)
    rest = sequence_length % step
    shortest = max(1, -(-min_length // step)) * step
    if rest + shortest * num_segments > sequence_length:
        shortest = step

    low, high = 0.0, time(0, sequence_length)
    # Where a kernel is faster from some length on, a part of the sequence can take longer than the whole.
    while _ends(sequence_length, num_segments, time, high, shortest)[-1] < sequence_length:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _ends(sequence_length, num_segments, time, middle, shortest)[-1] < sequence_length:
            low = middle
        else:
            high = middle
    ends = _ends(sequence_length, num_segments, time, high, shortest)
    return _on_positions(ends, sequence_length, step, rest, shortest)


def _ends(sequence_length: int, num_segments: int, time: SegmentTime, most: float, shortest: int) -> list[int]:
    """Where segments end that each cost up to `most`, or are `shortest` tokens long."""
    ends = [0]
    for _ in range(num_segments):
        candidates = range(ends[-1] + 1, sequence_length + 1)
        end = ends[-1] + bisect_right(candidates, most, key=partial(time, ends[-1]))
        ends.append(min(max(end, ends[-1] + shortest), sequence_length))
    return ends[1:]


def _on_positions(ends: Sequence[int], sequence_length: int, step: int, rest: int, shortest: int) -> tuple[int, ...]:
    """The lengths between `ends`, each moved to the nearest position that is a multiple of `step` before the end.

    Moving both ends of a segment of at least `shortest` leaves it that long; the first takes what is left over.
    """
    rounded = []
    for i, end in enumerate(ends, start=1):
        nearest = rest + (end - rest + step // 2) // step * step
        most = sequence_length - (len(ends) - i) * shortest
        rounded.append(min(max(nearest, rest + i * shortest), most))
    return tuple(end - start for start, end in pairwise([0, *rounded]))
