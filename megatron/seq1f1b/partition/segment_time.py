"""What a cut has to do with costs: the time of a segment is a function of where the segment lies."""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

# Seconds, or any other unit, for a segment of the tokens [start, end).
SegmentTime = Callable[[int, int], float]


def segment_times(lengths: Iterable[int], time: SegmentTime) -> list[float]:
    """The time of each of the segments of a sequence."""
    return [time(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]
