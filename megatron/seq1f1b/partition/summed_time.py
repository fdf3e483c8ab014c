"""Times of segments that add up token by token: sequences are cut by their running sums, without a call for each cut.

Tested in partition/test_partition.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Of (start, first, latest, most): the last of the cuts from `first` to `latest` to which a segment from the cut `start`
# takes at most `most`; `first - 1` if there is none.
Reach = Callable[[int, int, int, float], int]


class SummedTime(Protocol):
    """The time of a segment on a stage: a constant, and a time of every token, whatever the length of its segment."""

    @property
    def fixed(self) -> float: ...

    def __call__(self, start: int, end: int) -> float: ...

    def before(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The time of all tokens before each position, without the constant."""
        ...


@dataclass(frozen=True)
class SlowestTime:
    """The time of a segment on the slowest of several stages."""

    of_stages: tuple[SummedTime, ...]

    def __call__(self, start: int, end: int) -> float:
        return max([time(start, end) for time in self.of_stages])

    def reach(self, cuts: Sequence[int]) -> Reach:
        """How far segments between these ascending positions reach."""
        positions = np.array(cuts)
        sums = [(time.fixed, time.before(positions).tolist()) for time in self.of_stages]

        def reach(start: int, first: int, latest: int, most: float) -> int:
            # Of a stage: before[end] - before[start] + fixed <= most.
            ends = [bisect_right(before, before[start] + most - fixed, first, latest + 1) for fixed, before in sums]
            return min(ends) - 1

        return reach
