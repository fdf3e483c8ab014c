"""The dynamic programme of TeraPipe over the tokens of a sequence (arXiv 2102.07988, section 3.3).

Through a pipeline of K stages the segments of one sequence take

    T = Σ tᵢ + (K − 1) · max tⱼ        (equation 5)

where tᵢ is the time of segment i on the slowest stage. With tmax the most that a segment may take, the least sum
S*(tmax) is a shortest path over the positions of the sequence (equations 7 and 8), and T* is the least S*(tmax) +
(K − 1) · tmax (equation 6). The paper tries every time that a segment takes. Here intervals of tmax are halved, and
dropped if they hold nothing better: S* never grows with tmax, so it is at least that of the upper end of an interval.

Tested in partition/test_partition.py.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from .lengths import Task, check_length, positions, tile

# Relative tolerances: of the latency, and of the longest time among paths of equal total time.
_TOLERANCE = 1e-6
_BALANCE_TOLERANCE = 1e-3

_MOST_POSITIONS = 1024  # at which a sequence may be cut; twice as many take four times as long
_USUAL_SEGMENTS = 16  # for the default step if the number of segments is free
_MOST_SEGMENTS = 256  # each takes one more pass over all pairs of positions


class Path(NamedTuple):
    """The end positions of segments, the sum of their times, and the longest time."""

    ends: tuple[int, ...]
    total: float
    longest: float


def terapipe(task: Task) -> tuple[int, ...]:
    """The lengths in tokens, first to last, of least latency; the sum of equation 5 counts `num_microbatches` times.

    With `num_segments` None the number of segments is free; `time` must then have a part that does not shrink with the
    segment, or the shortest segments are always best. Segments are multiples of `multiple_of` and of up to 128 tokens,
    of more in sequences above 131072 tokens; the first takes the remainder. Raises ValueError if the sequence is too
    short for so many segments, or for more than 256.
    """
    length = task.sequence_length
    num_segments = task.num_segments
    time = task.time
    assert time is not None
    check_length(length, num_segments or 1, task.multiple_of)
    if num_segments is not None and num_segments > _MOST_SEGMENTS:
        raise ValueError(
            f"--sequence-split-strategy terapipe cuts into {_MOST_SEGMENTS} segments at most, since more take minutes; "
            f"give fewer than --sequence-splits {num_segments}, or --sequence-split-strategy balanced"
        )
    step = tile(length, num_segments or _USUAL_SEGMENTS, task.multiple_of)
    while length > step * max(_MOST_POSITIONS, 2 * (num_segments or 1)):
        step *= 2
    cuts = positions(length, step)
    last = len(cuts) - 1
    # Indexed by end and start - end, so short segments are at the end of a row. Infinite before the sequence.
    times = np.full((last + 1, last), inf)
    for i, end in enumerate(cuts):
        times[i, last - i :] = [time(start, end) for start in cuts[:i]]
    weight = (task.num_stages - 1) / task.num_microbatches
    path = _least_latency(_shortest_path(times, num_segments), weight, num_segments)
    return tuple(cuts[end] - cuts[start] for start, end in pairwise((0, *path.ends)))


# The path of least total in which no segment takes longer than this time; None if there is no such path.
PathWithin = Callable[[float], Path | None]


def _least_latency(path_within: PathWithin, weight: float, num_segments: int | None) -> Path:
    """The path of least `total` + `weight` · `longest`; ties go to the least `longest`."""

    def latency(path: Path) -> float:
        return path.total + weight * path.longest

    best = path_within(inf)
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
        found = path_within(middle)
        if found is None or found.total > least:
            heappush(intervals, (least + weight * middle, middle, high, least))
        if found is not None:
            # From its longest time up to the middle this path stays the best.
            heappush(intervals, (found.total + weight * low, low, found.longest, found.total))
            best = min(best, found, key=latency)
    # Without a weight the longest time does not count, so any path of least total may have been found.
    return best if weight else _balanced_path(best, path_within, shortest)


def _balanced_path(path: Path, path_within: PathWithin, shortest: float) -> Path:
    """A path of the same total with a smaller longest time if there is one; none has less than `shortest`."""
    best = path
    low = shortest
    while best.longest - low > _BALANCE_TOLERANCE * best.longest:
        middle = (low + best.longest) / 2
        found = path_within(middle)
        if found is not None and found.total <= best.total * (1 + _TOLERANCE):
            best = found
        else:
            low = middle
    return best


def _shortest_path(times: NDArray[np.float64], num_segments: int | None) -> PathWithin:
    """The dynamic programme for these `times` of segments, by end and start - end."""
    last = len(times) - 1

    def path_within(tmax: float) -> Path | None:
        possible = times <= tmax
        longest = last - int(possible.any(axis=0).argmax())  # the longest allowed segment, in positions
        allowed = np.where(possible, times, inf)[:, last - longest :]
        if num_segments is None:
            total, starts = _with_any_number(allowed, longest)
        else:
            total, starts = _with_number(allowed, longest, num_segments)
        if total == inf:
            return None
        path = [last]
        while path[-1] > 0:
            path.append(int(starts.pop()[path[-1]]))
        path.reverse()
        bottleneck = max(float(times[end, start - end]) for start, end in pairwise(path))
        return Path(tuple(path[1:]), total, bottleneck)

    return path_within


# The start of a segment, by its end position.
Starts = NDArray[np.int64]


def _with_any_number(allowed: NDArray[np.float64], longest: int) -> tuple[float, list[Starts]]:
    """The least total of a path to the last position, of any number of segments, and the starts of each segment."""
    last = len(allowed) - 1
    totals = _totals_at_start(last, longest)
    start_of = np.zeros(last + 1, dtype=np.int64)
    for end in range(1, last + 1):  # every segment extends any number of earlier ones
        options = totals[end : end + longest] + allowed[end]
        best = options.argmin()
        start_of[end] = best + end - longest
        totals[longest + end] = options[best]
    return float(totals[-1]), [start_of] * last  # the same for all segments, of which there are `last` at most


def _with_number(allowed: NDArray[np.float64], longest: int, num_segments: int) -> tuple[float, list[Starts]]:
    """The same for a path of this number of segments."""
    last = len(allowed) - 1
    ends = np.arange(last + 1)
    totals = _totals_at_start(last, longest)
    starts: list[Starts] = []
    for _ in range(num_segments):  # segments are added one by one
        options = sliding_window_view(totals, longest)[: last + 1] + allowed
        best = options.argmin(axis=1)
        starts.append(best + ends - longest)
        totals[longest:] = options[ends, best]
    return float(totals[-1]), starts


def _totals_at_start(last: int, longest: int) -> NDArray[np.float64]:
    """The totals of empty paths by their end positions, behind `longest` entries for positions before the sequence."""
    totals = np.full(longest + last + 1, inf)
    totals[longest] = 0.0
    return totals
