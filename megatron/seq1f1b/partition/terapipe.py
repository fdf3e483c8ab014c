"""The dynamic programme of TeraPipe over the tokens of a sequence (arXiv 2102.07988, section 3.3).

Through a pipeline of K stages the segments of one sequence take

    T = Σ tᵢ + (K − 1) · max tⱼ        (equation 5)

where tᵢ is the time of segment i on the slowest stage. For a given bound tmax on the longest time, the least sum
S*(tmax) of segments within the bound is a shortest path over the positions of the sequence (equations 7 and 8), and T*
is the least S*(tmax) + (K − 1) · tmax over all tmax (equation 6). The paper tries every time that a segment takes. Here
intervals of tmax are halved, and dropped if they hold nothing better: S* never grows with tmax, so between two bounds
S*(tmax) + (K − 1) · tmax is at least S* of the upper one plus K − 1 times the lower one.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from .lengths import SegmentTime, check_length, positions, tile

# Relative tolerances: of the latency, and of the longest time among paths of equal total time.
_TOLERANCE, _BALANCE_TOLERANCE = 1e-6, 1e-3

_MOST_POSITIONS = 1024  # at which a sequence may be cut; twice as many take four times as long
_USUAL_SEGMENTS = 16  # for the default step if the number of segments is free


class Path(NamedTuple):
    """The end positions of segments, the sum of their times, and the longest time."""

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

    With `num_segments` None the number of segments is free; `time` must then have a part that does not shrink with the
    segment, or the shortest segments are always best. The sum of equation 5 counts `num_microbatches` times. Segments
    are multiples of `step` tokens, itself a multiple of `multiple_of`, and the first takes the remainder; by default
    the step is 128 tokens, more for sequences above 131072 tokens, fewer for short segments. Raises ValueError if that
    leaves too few positions.
    """
    check_length(sequence_length, num_segments or 1, multiple_of)
    if step is None:
        step = tile(sequence_length, num_segments or _USUAL_SEGMENTS, multiple_of)
        while sequence_length > step * _MOST_POSITIONS:
            step *= 2
    cuts = positions(sequence_length, step)
    last = len(cuts) - 1
    if (num_segments or 1) > last:
        raise ValueError(
            f"--sequence-splits {num_segments or 1} are more segments than the {last} pieces of {step} tokens "
            f"in --seq-length {sequence_length}; use fewer segments or --sequence-split-strategy balanced"
        )
    # Indexed by end and start - end, so short segments are at the end of a row. Infinite before the sequence.
    times = np.full((last + 1, last), inf)
    for i, end in enumerate(cuts):
        times[i, last - i :] = [time(start, end) for start in cuts[:i]]
    path = _least_latency(_shortest_path(times, num_segments), (num_stages - 1) / num_microbatches, num_segments)
    return tuple(cuts[end] - cuts[start] for start, end in pairwise((0, *path.ends)))


def _least_latency(solve: Callable[[float], Path | None], weight: float, num_segments: int | None) -> Path:
    """The path of least `total` + `weight` · `longest`; ties go to the least `longest`.

    `solve(tmax)` returns a path of least total among paths with a longest time of at most tmax, or None.
    """

    def latency(path: Path) -> float:
        return path.total + weight * path.longest

    best = solve(inf)
    assert best is not None, "there are enough positions for so many segments"
    shortest = best.total / num_segments if num_segments else 0.0  # no path has a smaller longest time
    # Open intervals of tmax, the most promising first: (bound of the latency, low, high, bound of the total).
    intervals = [(best.total + weight * shortest, shortest, best.longest, best.total)]
    while intervals:
        bound, low, high, least = heappop(intervals)
        if bound >= latency(best) * (1 - _TOLERANCE):
            break
        middle = (low + high) / 2
        if not low < middle < high:
            continue
        found = solve(middle)
        if found is None or found.total > least:
            heappush(intervals, (least + weight * middle, middle, high, least))
        if found is not None:
            # From its longest time up to the middle this path stays the best.
            heappush(intervals, (found.total + weight * low, low, found.longest, found.total))
            best = min(best, found, key=latency)

    # Without a weight, the least total alone leaves the longest time open, so minimise that too.
    low = shortest
    while not weight and best.longest - low > _BALANCE_TOLERANCE * best.longest:
        middle = (low + best.longest) / 2
        found = solve(middle)
        if found is not None and found.total <= best.total * (1 + _TOLERANCE):
            best = found
        else:
            low = middle
    return best


def _shortest_path(times: NDArray[np.float64], num_segments: int | None) -> Callable[[float], Path | None]:
    """A function of tmax: the segments of least total that each take at most tmax; None if there are none."""
    last = len(times) - 1

    def solve(tmax: float) -> Path | None:
        possible = times <= tmax
        longest = last - int(possible.any(axis=0).argmax())  # the longest allowed segment, in positions
        allowed = np.where(possible, times, inf)[:, last - longest :]
        total, starts = _by_any_number(allowed) if num_segments is None else _by_number(allowed, num_segments)
        if total == inf:
            return None
        ends = [last]
        for start_of in reversed(starts):
            ends.append(int(start_of[ends[-1]]))
            if ends[-1] == 0:
                break
        ends.reverse()
        bottleneck = max(float(times[end, start - end]) for start, end in pairwise(ends))
        return Path(tuple(ends[1:]), total, bottleneck)

    return solve


def _by_any_number(times: NDArray[np.float64]) -> tuple[float, Sequence[NDArray[np.int64]]]:
    """The least total, and for each segment an array of its start for every end position."""
    size, longest = times.shape
    totals = np.full(longest + size, inf)  # entries before the sequence come first
    totals[longest] = 0.0
    starts = np.zeros(size, dtype=np.int64)
    for end in range(1, size):  # every segment extends any number of earlier ones
        options = totals[end : end + longest] + times[end]
        best = options.argmin()
        starts[end] = best + end - longest
        totals[longest + end] = options[best]
    return float(totals[-1]), [starts] * (size - 1)


def _by_number(times: NDArray[np.float64], num_segments: int) -> tuple[float, Sequence[NDArray[np.int64]]]:
    """`_by_any_number` for a given number of segments, added one by one."""
    size, longest = times.shape
    totals = np.full(longest + size, inf)
    totals[longest] = 0.0
    ends, starts = np.arange(size), []
    for _ in range(num_segments):
        options = sliding_window_view(totals, longest)[:size] + times
        best = options.argmin(axis=1)
        starts.append(best + ends - longest)
        totals[longest:] = options[ends, best]
    return float(totals[-1]), starts
