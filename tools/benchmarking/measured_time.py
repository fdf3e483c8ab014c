"""Times of segments from measurements (TeraPipe, arXiv 2102.07988, equation 9).

For a segment of i tokens after a prefix of j, t(i, j) = t(i, 0) + a₀ + a₁·i + a₂·j + a₃·i·j. The first term is measured
for some lengths i; in between, the time per token is interpolated, which is exact where the time is c₁·i + c₂·i². What
the prefix costs is fitted by least squares of the relative errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.seq1f1b.costs.stage_costs import TimedSegment


@dataclass(frozen=True)
class MeasuredTime:
    """`per_token[n]` is the time of a token in a segment of `lengths[n]` tokens without prefix, `prefix` a₀ to a₃."""

    lengths: tuple[int, ...]
    per_token: tuple[float, ...]
    prefix: tuple[float, ...]

    def __call__(self, start: int, end: int) -> float:
        length = end - start
        seconds = self._alone(length)
        if start:
            a0, a1, a2, a3 = self.prefix
            seconds += a0 + a1 * length + (a2 + a3 * length) * start
        return seconds

    def _alone(self, length: int) -> float:
        """A segment shorter than the shortest measured one takes as long as that, since kernels do not speed up for
        fewer rows."""
        if length <= self.lengths[0]:
            return self.lengths[0] * self.per_token[0]
        return length * float(np.interp(length, self.lengths, self.per_token))


def fit(points: Sequence[TimedSegment]) -> MeasuredTime:
    alone = {point.length: point.seconds for point in points if point.prefix == 0}
    after = [point for point in points if point.prefix]
    rows = [[x / t for x in (1, length, prefix, length * prefix)] for length, prefix, t in after]
    values = [(point.seconds - alone[point.length]) / point.seconds for point in after]
    matrix = np.array(rows)
    scales = np.linalg.norm(matrix, axis=0)
    coefficients = np.linalg.lstsq(matrix / scales, np.array(values), rcond=1e-8)[0] / scales
    lengths = tuple(sorted(alone))
    return MeasuredTime(lengths, tuple(alone[length] / length for length in lengths), tuple(coefficients.tolist()))
