"""Times of segments from measurements (TeraPipe, arXiv 2102.07988, equation 9).

For a segment of i tokens after a prefix of j, t(i, j) = t(i, 0) + a₀ + a₁·i + a₂·j + a₃·i·j. The first term is measured
for some lengths i; in between, the time per token is interpolated, which is exact where the time is c₁·i + c₂·i². The
rest, what the prefix costs, is fitted by least squares of the relative errors.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...partition import SegmentTime


class Point(NamedTuple):
    """A segment of `length` tokens after `prefix` tokens took `time`."""

    length: int
    prefix: int
    time: float


class PrefixCost(NamedTuple):
    """What a prefix of j tokens adds to the time of a segment of i: a₀ + a₁·i + a₂·j + a₃·i·j."""

    a0: float = 0.0
    a1: float = 0.0
    a2: float = 0.0
    a3: float = 0.0


@dataclass(frozen=True)
class MeasuredTime:
    """Time of a segment: `per_token[n]` is the time of a token in a segment of `lengths[n]` tokens without prefix."""

    lengths: tuple[int, ...]
    per_token: tuple[float, ...]
    prefix: PrefixCost = PrefixCost()

    def __call__(self, start: int, end: int) -> float:
        length = end - start
        time = self._alone(length)
        if start:
            a0, a1, a2, a3 = self.prefix
            time += a0 + a1 * length + (a2 + a3 * length) * start
        return time

    def __add__(self, other: "MeasuredTime") -> "MeasuredTime":
        assert self.lengths == other.lengths, "times fitted on different lengths"
        return MeasuredTime(
            self.lengths,
            tuple(a + b for a, b in zip(self.per_token, other.per_token, strict=True)),
            PrefixCost(*(a + b for a, b in zip(self.prefix, other.prefix, strict=True))),
        )

    def times(self, count: int) -> "MeasuredTime":
        """The time of `count` of these, one after another."""
        return MeasuredTime(
            self.lengths, tuple(count * a for a in self.per_token), PrefixCost(*(count * a for a in self.prefix))
        )

    def covers(self, other: "MeasuredTime") -> bool:
        """Whether no segment can take longer by `other`."""
        return all(a >= b for a, b in zip(self.per_token + self.prefix, other.per_token + other.prefix, strict=True))

    def _alone(self, length: int) -> float:
        """The time without a prefix. A segment shorter than the shortest measured one takes as long as that, since
        kernels do not speed up for fewer rows; beyond the longest the last line continues."""
        lengths, per_token = self.lengths, self.per_token
        if length <= lengths[0]:
            return lengths[0] * per_token[0]
        if len(lengths) == 1:
            return length * per_token[0]
        i = min(bisect_right(lengths, length), len(lengths) - 1)
        slope = (per_token[i] - per_token[i - 1]) / (lengths[i] - lengths[i - 1])
        return length * (per_token[i - 1] + slope * (length - lengths[i - 1]))


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The coefficients c that minimise Σ (row · c − value)²; raises ValueError if the rows do not determine them."""
    matrix = np.array(rows, dtype=float)
    scales = np.linalg.norm(matrix, axis=0) if matrix.size else np.ones(0)
    scales[scales == 0] = 1.0
    # Columns of equal length make the rank independent of their units.
    coefficients, _, rank, _ = np.linalg.lstsq(matrix / scales, np.array(values), rcond=1e-8)
    if not rank or rank < len(scales):
        raise ValueError("the measurements do not determine the coefficients")
    return [float(c) for c in coefficients / scales]


def fit(points: Sequence[Point]) -> MeasuredTime:
    """Fit times to measurements; if none has a prefix, the prefix costs nothing.

    Raises ValueError if a length was measured with a prefix but not without one, or if the prefixes are too few: at
    least two lengths, each with two prefixes, are needed.
    """
    alone = {point.length: point.time for point in points if point.prefix == 0}
    after_prefix = [point for point in points if point.prefix]
    missing = {point.length for point in after_prefix} - alone.keys()
    if missing or not alone:
        raise ValueError(f"no measurement without prefix of length {min(missing, default='any')}")
    lengths = tuple(sorted(alone))
    per_token = tuple(alone[length] / length for length in lengths)
    if not after_prefix:
        return MeasuredTime(lengths, per_token)
    rows = [[x / t for x in (1, length, prefix, length * prefix)] for length, prefix, t in after_prefix]
    values = [(point.time - alone[point.length]) / point.time for point in after_prefix]
    return MeasuredTime(lengths, per_token, PrefixCost(*least_squares(rows, values)))


def relative_errors(time: SegmentTime, points: Sequence[Point]) -> list[float]:
    """|fitted − measured| / measured of every point."""
    return [abs(time(point.prefix, point.prefix + point.length) - point.time) / point.time for point in points]
