"""Times of segments from measurements (TeraPipe, arXiv 2102.07988, equation 9).

For a segment of i tokens after a prefix of j, t(i, j) = t(i, 0) + a₀ + a₁·i + a₂·j + a₃·i·j. The first term is measured
for some lengths i; in between, the time per token is interpolated, which is exact where the time is c₁·i + c₂·i². The
rest, what the prefix costs, is fitted by least squares of the relative errors.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from ...partition import SegmentTime
from ...schedule import UNUSABLE, read_json, reason
from .model_shape import ModelShape
from .stage_costs import StageCost


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


PARTS = ("layer", "embedding", "head")


class Measurement(NamedTuple):
    """Seconds of a segment of `length` tokens after `prefix` tokens; `weight` is a part of `backward`."""

    length: int
    prefix: int
    forward: float
    backward: float
    weight: float


class FitError(NamedTuple):
    """Relative errors of the fitted times of a layer after a prefix, over all measurements of both directions."""

    mean: float
    highest: float


@dataclass(frozen=True)
class Profile:
    """The measurements of each of `PARTS`, with their model and sizes. `model.num_layers` does not matter."""

    device: str
    model: ModelShape
    micro_batch_size: int
    tensor_parallel_size: int
    parts: Mapping[str, Sequence[Measurement]]

    def costs(self, layers_per_stage: Sequence[int]) -> tuple[StageCost, ...]:
        """The cost of a segment on every stage in seconds; embedding on the first, head on the last.

        Raises ValueError if the measurements do not suffice.
        """
        directions = {name: self._fitted(name) for name in PARTS}
        if len({time.lengths for pair in directions.values() for time in pair}) > 1:
            raise ValueError("layer, embedding and head are not measured at the same lengths")
        costs = []
        for stage, num_layers in enumerate(layers_per_stage):
            times = [time.times(num_layers) for time in directions["layer"]]
            if stage == 0:
                times = [a + b for a, b in zip(times, directions["embedding"], strict=True)]
            if stage == len(layers_per_stage) - 1:
                times = [a + b for a, b in zip(times, directions["head"], strict=True)]
            forward, backward, weight = times
            costs.append(StageCost(forward, backward, weight, forward + backward))
        return tuple(costs)

    def fit_error(self) -> FitError:
        """How well equation 9 of TeraPipe describes this device; the paper finds less than 2 %."""
        errors = [
            error
            for direction, fitted in enumerate(self._fitted("layer")[:2])
            for error in relative_errors(fitted, self._points("layer", direction, least_prefix=1))
        ]
        return FitError(mean(errors), max(errors)) if errors else FitError(0.0, 0.0)

    def _fitted(self, part: str) -> tuple[MeasuredTime, ...]:
        """Forward, backward, weight gradients; the last do not depend on the prefix."""
        alone = [point for point in self._points(part, 2) if not point.prefix]
        return fit(self._points(part, 0)), fit(self._points(part, 1)), fit(alone)

    def _points(self, part: str, direction: int, least_prefix: int = 0) -> list[Point]:
        return [
            Point(length, prefix, times[direction])
            for length, prefix, *times in self.parts[part]
            if prefix >= least_prefix
        ]


def write_profile(profile: Profile, path: str | Path) -> None:
    data = {
        "device": profile.device,
        "model": asdict(profile.model),
        "micro_batch_size": profile.micro_batch_size,
        "tensor_parallel_size": profile.tensor_parallel_size,
        "parts": {name: [row._asdict() for row in rows] for name, rows in profile.parts.items()},
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_profile(profile: str | Path) -> Profile:
    """Raises ValueError if the file cannot be read, or its measurements do not suffice for a fit."""
    try:
        data = read_json(profile)
        model = data["model"]
        if model.get("latent") or model.get("experts"):
            raise ValueError("layers with experts or latent attention are measured by a trace of a run instead")
        # JSON has lists for tuples.
        model = {name: tuple(value) if isinstance(value, list) else value for name, value in model.items()}
        measured = Profile(
            data["device"],
            ModelShape(**model),
            data["micro_batch_size"],
            data["tensor_parallel_size"],
            {name: tuple(Measurement(**row) for row in data["parts"][name]) for name in PARTS},
        )
        rows = [row for part in measured.parts.values() for row in part]
        for row in rows:
            if not (0 < row.length < inf and 0 <= row.prefix < inf and 0 < row.forward < inf):
                raise ValueError(f"{row.length} tokens after {row.prefix} in {row.forward} s are not measured")
            if not 0 <= row.weight < row.backward < inf:
                raise ValueError(f"of a backward of {row.backward} s, weight gradients cannot take {row.weight} s")
        measured.costs([1])
    except UNUSABLE as error:
        raise ValueError(
            f"--sequence-split-profile {profile} is no usable profile ({reason(error)}); measure one with "
            "`seq1f1b profile`"
        ) from error
    return measured


def check_profile(profile: Profile, path: str | Path, model: ModelShape, tensor_parallel_size: int) -> None:
    """Raises ValueError if `profile` is of another model, apart from the number of layers, or of other sizes."""
    measured = asdict(profile.model) | {"tensor_parallel_size": profile.tensor_parallel_size}
    wanted = asdict(model) | {"tensor_parallel_size": tensor_parallel_size}
    different = [name for name in wanted if name != "num_layers" and measured[name] != wanted[name]]
    if different:
        what = ", ".join(f"{name} {measured[name]} instead of {wanted[name]}" for name in different)
        raise ValueError(
            f"--sequence-split-profile {path} was measured on another model ({what}); measure this one with "
            "`seq1f1b profile`, or give the trace of a run of it (--pipeline-trace)"
        )
