"""The dynamic programme of TeraPipe over the tokens of a sequence (arXiv 2102.07988, section 3.3).

Through a pipeline of K stages the segments of one sequence take

    T = Σ tᵢ + (K − 1) · max tⱼ        (equation 5)

where tᵢ is the time of segment i on the slowest stage. For a given bound tmax on the longest time, the least sum
S*(tmax) of segments that keep the bound is a shortest path over the positions of the sequence (equations 7 and 8), and
T* is the least S*(tmax) + (K − 1) · tmax over all tmax (equation 6).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from .bottleneck_search import bottleneck_search
from .cut_positions import PartitionError, check_length, positions, tile
from .segment_time import SegmentTime

# Positions at which a sequence may be cut, at most: twice as many take four times as long.
_MOST_POSITIONS = 1024

# A free number of segments is taken for this many in the choice of a step.
_USUAL_SEGMENTS = 16


class Path(NamedTuple):
    """Segments by the positions at which they end, the sum of their times and the longest of them."""

    ends: tuple[int, ...]
    total: float
    longest: float


def terapipe(
    sequence_length: int,
    time: SegmentTime,
    num_stages: int,
    num_segments: int | None = None,
    multiple_of: int = 1,
    num_microbatches: int = 1,
    step: int | None = None,
) -> tuple[int, ...]:
    """The lengths in tokens, first to last, of least latency through `num_stages` stages.

    `num_segments` None leaves the number of segments free; that needs times with a part that does not shrink with the
    segment, or the shortest segments are always best. With `num_microbatches` sequences one after another the sum of
    equation 5 counts that often. Segments are multiples of `step` tokens, a multiple of `multiple_of`, and the
    first takes what is left over; by default the step is 128 tokens, longer for sequences above 131072 tokens and
    shorter where segments would be few steps long. Raises PartitionError if that leaves too few positions.
    """
    check_length(sequence_length, num_segments or 1, multiple_of)
    step = step or _step(sequence_length, num_segments or _USUAL_SEGMENTS, multiple_of)
    cuts = positions(sequence_length, step)
    if (num_segments or 1) >= len(cuts):
        raise PartitionError(
            f"--sequence-splits {num_segments or 1} are more segments than the {len(cuts) - 1} pieces of {step} tokens "
            f"in --seq-length {sequence_length}; use fewer segments or --sequence-split-strategy balanced"
        )
    times = table(cuts, time)
    whole = shortest_path(times)(inf)
    # Segments of equal time would take a k-th of the whole each.
    path = bottleneck_search(
        shortest_path(times, num_segments),
        weight=(num_stages - 1) / num_microbatches,
        floor=whole.total,
        guess=whole.total / (num_segments or 1),
    )
    return lengths_between(cuts, path.ends)


def table(cuts: Sequence[int], time: SegmentTime) -> list[list[float]]:
    """`table[end][start]`: the time of the segment between two of the positions `cuts`."""
    return [[time(start, end) for start in cuts[:i]] for i, end in enumerate(cuts)]


def lengths_between(cuts: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Lengths in tokens of segments that end at the positions number `ends`."""
    return tuple(cuts[end] - cuts[start] for start, end in pairwise((0, *ends)))


def shortest_path(times: list[list[float]], num_segments: int | None = None) -> Callable[[float], Path | None]:
    """A function of tmax: the segments of least total that each take at most tmax; None if there are none."""
    last = len(times) - 1
    # A segment may take less than a shorter one, since kernels are slow for short segments. The running minimum, here
    # negated to ascend, tells from where on a start is near enough at all.
    reach = [list(accumulate((-time for time in row), max)) for row in times]

    def solve(tmax: float) -> Path | None:
        nearest = [bisect_left(row, -tmax) for row in reach]
        totals = [0.0] + [inf] * last
        if num_segments is None:  # one pass in place: every segment extends any number of earlier ones
            starts = _extend(times, tmax, nearest, totals, totals, range(last), range(1, last + 1))
            layers = [starts] * last
        else:
            layers = []
            first_from = list(accumulate(reversed(nearest), min))[::-1]
            useful = [last]  # for each segment, from the last to the first, the least end that can still lead there
            for _ in range(num_segments - 1):
                useful.append(first_from[useful[-1]])
            live = range(1)
            for least_end in reversed(useful):
                before, totals = totals, [inf] * (last + 1)
                ends = range(max(least_end, live.start + 1), last + 1)
                layers.append(_extend(times, tmax, nearest, before, totals, live, ends))
                found = [end for end in ends if totals[end] < inf]
                if not found:
                    return None
                live = range(found[0], found[-1] + 1)
        if totals[last] == inf:
            return None
        ends = [last]
        for starts in reversed(layers):
            ends.append(starts[ends[-1]])
            if ends[-1] == 0:
                break
        ends.reverse()
        longest = max(times[end][start] for start, end in pairwise(ends))
        return Path(tuple(ends[1:]), totals[last], longest)

    return solve


def _extend(
    times: list[list[float]],
    tmax: float,
    nearest: list[int],
    before: list[float],
    after: list[float],
    live: range,
    ends: range,
) -> list[int]:
    """Add one segment to the least totals `before` of the positions `live`, for those in `ends`.

    Returns, for every position, where its last segment starts.
    """
    starts = [0] * len(times)
    for end in ends:
        low, high = max(nearest[end], live.start), min(end, live.stop)
        if low < high:
            options = [
                total + time if time <= tmax else inf
                for total, time in zip(before[low:high], times[end][low:high], strict=True)
            ]
            after[end] = min(options)
            starts[end] = low + options.index(after[end])
    return starts


def _step(sequence_length: int, num_segments: int, multiple_of: int) -> int:
    step = tile(sequence_length, num_segments, multiple_of)
    while sequence_length > step * _MOST_POSITIONS:
        step *= 2
    return step
