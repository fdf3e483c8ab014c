"""The search over tmax that the dynamic programmes of TeraPipe share (arXiv 2102.07988, equation 6).

The paper tries every time that a segment can take. Here intervals of tmax are halved, and dropped as soon as they can
hold nothing better: S* never grows with tmax, so between two bounds S*(tmax) + weight · tmax is at least S* of the
upper one plus weight times the lower one.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Protocol

# The latency found is at most this much above the least, relatively.
TOLERANCE = 1e-6

# While no upper end of tmax is known, the next try is this much above the lower end.
_GROWTH = 1.25


class Timed(Protocol):
    """A way to run everything: the sum of the times of its units, and the longest of them."""

    total: float
    longest: float


def bottleneck_search[Solution: Timed](
    solve: Callable[[float], Solution | None], weight: float, floor: float, guess: float
) -> Solution:
    """The solution of least `total` + `weight` · `longest`.

    `solve(tmax)` gives one of least total among those whose longest time is at most tmax, or None; for a tmax that is
    large enough it must find one. No total is below `floor`. The search begins at `guess`, a positive tmax.
    """

    def latency(solution: Solution) -> float:
        return solution.total + weight * solution.longest

    best: Solution | None = None
    # Open intervals of tmax, the most promising first: (bound of the latency, low, high, bound of the total).
    intervals = [(floor, 0.0, inf, floor)]
    while intervals:
        bound, low, high, least = heappop(intervals)
        middle = (low + high) / 2 if high < inf else max(guess, _GROWTH * low)
        if not low < middle < high or best and bound >= latency(best) * (1 - TOLERANCE):
            continue
        found = solve(middle)
        if found is None or found.total > least:
            heappush(intervals, (least + weight * middle, middle, high, least))
        if found is not None:
            # From its longest time up to the middle this solution stays the best.
            heappush(intervals, (found.total + weight * low, low, found.longest, found.total))
            best = min(best or found, found, key=latency)
    return best
