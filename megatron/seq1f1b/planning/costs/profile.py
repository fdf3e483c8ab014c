"""Times of segments measured on the user's model and hardware, and their file.

The JSON, as tools/profile_segments.py writes it:

    {"device": "...", "model": {sizes of a ModelShape}, "micro_batch_size": 1, "tensor_parallel_size": 1,
     "parts": {"layer": [{"length": 1024, "prefix": 2048, "forward": 0.011, "backward": 0.025, "weight": 0.006}, ...],
               "embedding": [...], "head": [...]}}

Times are in seconds, for a micro-batch; `weight` is the part of `backward` that gives the weight gradients of linear
layers. Every part is measured at the same lengths without a prefix; the layer, which is one transformer layer, also
after prefixes. `head` is the final norm, the projection to the vocabulary and the loss.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from ...errors import ParameterError
from ...schedule import UNUSABLE, read_json, reason
from .measured_time import MeasuredTime, Point, fit, relative_errors
from .model_shape import ModelShape
from .stage_costs import StageCost

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
    """Raises ParameterError if the file cannot be read, or its measurements do not suffice for a fit."""
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
        raise ParameterError(
            "{profile} is no usable profile ({0}); measure one with tools/profile_segments.py",
            reason(error),
            profile=profile,
        ) from error
    return measured


def check_profile(profile: Profile, path: str | Path, model: ModelShape, tensor_parallel_size: int) -> None:
    """Raises ParameterError if `profile` is of another model, apart from the number of layers, or of other sizes."""
    measured = asdict(profile.model) | {"tensor_parallel_size": profile.tensor_parallel_size}
    wanted = asdict(model) | {"tensor_parallel_size": tensor_parallel_size}
    different = [name for name in wanted if name != "num_layers" and measured[name] != wanted[name]]
    if different:
        what = ", ".join(f"{name} {measured[name]} instead of {wanted[name]}" for name in different)
        raise ParameterError(
            "{profile} was measured on another model ({0}); measure this one with tools/profile_segments.py, or give "
            "the trace of a run of it ({pipeline_trace.name})",
            what,
            profile=path,
        )
