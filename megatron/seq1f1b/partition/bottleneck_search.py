"""The search over tmax, the bound on the longest time, in TeraPipe's programme (arXiv 2102.07988, equation 6).

The paper tries every time that a segment can take. Here intervals of tmax are halved, and dropped as soon as they can
hold nothing better: S* never grows with tmax, so between two bounds S*(tmax) + weight · tmax is at least S* of the
upper one plus weight times the lower one.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

# The latency found is at most this much above the least, relatively.
TOLERANCE = 1e-6

# Of equal totals, the longest time of the one returned is at most this much above the least, relatively.
_BALANCE_TOLERANCE = 1e-3


class Timed(Protocol):
    """A way to run everything: the sum of the times of its units, and the longest of them."""

    @property
    def total(self) -> float: ...

    @property
    def longest(self) -> float: ...


def bottleneck_search[Solution: Timed](
    solve: Callable[[float], Solution | None], unbounded: Solution, weight: float, shortest: float = 0.0
) -> Solution:
    """The solution of least `total` + `weight` · `longest`, and of equal totals that with the least `longest`.

    `solve(tmax)` gives one of least total among those whose longest time is at most tmax, or None; `unbounded` is one
    of least total of all. No longest time is below `shortest`.
    """

    def latency(solution: Solution) -> float:
        return solution.total + weight * solution.longest

    best = unbounded
    # Open intervals of tmax, the most promising first: (bound of the latency, low, high, bound of the total).
    intervals = [(best.total + weight * shortest, shortest, best.longest, best.total)]
    while intervals:
        bound, low, high, least = heappop(intervals)
        if bound >= latency(best) * (1 - TOLERANCE):
            break
        middle = (low + high) / 2
        if not low < middle < high:
            continue
        found = solve(middle)
        if found is None or found.total > least:
            heappush(intervals, (least + weight * middle, middle, high, least))
        if found is not None:
            # From its longest time up to the middle this solution stays the best.
            heappush(intervals, (found.total + weight * low, low, found.longest, found.total))
            best = min(best, found, key=latency)

    if weight:
        return best
    # Any longest time would do: the least total alone leaves it open.
    low = shortest
    while best.longest - low > _BALANCE_TOLERANCE * best.longest:
        middle = (low + best.longest) / 2
        found = solve(middle)
        if found is not None and found.total <= best.total * (1 + TOLERANCE):
            best = found
        else:
            low = middle
    return best
