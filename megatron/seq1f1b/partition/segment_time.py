"""All that a cut needs of costs: the time of a segment, as a function of where it lies."""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

# Seconds, or any other unit, for a segment of the tokens [start, end).
SegmentTime = Callable[[int, int], float]


def segment_times(lengths: Iterable[int], time: SegmentTime) -> list[float]:
    """The time of each of the segments of a sequence."""
    return [time(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]
