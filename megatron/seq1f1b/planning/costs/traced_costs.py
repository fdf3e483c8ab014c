"""What segments cost on the stages of a model, from the trace of a step that ran (`--pipeline-trace`).

The trace is of the user's own run, so its times include tensor parallelism, experts, any attention and hardware. The
time of a segment is taken for a constant, a part per token, and a part per pair of a query and a key that it sees.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, combinations
from pathlib import Path
from statistics import mean, median

from ...schedule import UNUSABLE, Kind, Timeline, read_json, read_timeline, reason
from .model_shape import ModelShape
from .profile import FitError, Point, check_profile, least_squares, read_profile, relative_errors
from .stage_costs import AnalyticTime, StageCost


def is_trace(path: str | Path) -> bool:
    """Whether the file is JSON in the form of a trace; False for what cannot be read."""
    try:
        data = read_json(path)
    except ValueError:
        return False
    return isinstance(data, dict) and {"meta", "ranks"} <= data.keys()


def read_traced_costs(profile: str | Path, num_stages: int) -> tuple[tuple[StageCost, ...], FitError]:
    """The cost of a segment on every stage, in seconds for a micro-batch, and how well they fit what was measured.

    Raises ValueError if the trace is of another number of stages, or has too few segments.
    """
    try:
        timeline = read_timeline(profile)
        if timeline.shape.num_stages != num_stages:
            raise ValueError(f"it has {timeline.shape.num_stages} stages, the model {num_stages}")
        return traced_costs(timeline)
    except UNUSABLE as error:
        raise ValueError(
            f"--sequence-split-profile {profile} is no usable trace ({reason(error)}); write one with --pipeline-trace "
            "in a run with --sequence-splits 4"
        ) from error


def read_stage_costs(
    path: str | Path, model: ModelShape, layers_per_stage: Sequence[int], tensor_parallel_size: int
) -> tuple[tuple[StageCost, ...], FitError, str]:
    """The measured cost of a segment on every stage, how well it fits, and where it was measured.

    The file is a profile or a trace. Raises ValueError if it is neither, or was measured on another model.
    """
    if is_trace(path):
        return *read_traced_costs(path, len(layers_per_stage)), "a run, by its trace"
    profile = read_profile(path)
    check_profile(profile, path, model, tensor_parallel_size)
    return profile.costs(layers_per_stage), profile.fit_error(), profile.device


def traced_costs(timeline: Timeline) -> tuple[tuple[StageCost, ...], FitError]:
    """As `read_traced_costs`; the medians over the micro-batches count.

    Where backwards are whole, the weight gradients are taken for half of what grows with the tokens alone: of the
    matrix products, half give input gradients. Raises ValueError.
    """
    lengths = timeline.meta.get("segment_lengths")
    if not lengths or len(lengths) < 2:
        raise ValueError("it does not have the lengths of at least two segments, the same in all micro-batches")
    ends = list(accumulate(lengths))
    seconds = defaultdict(list)
    for action, start, end in (span for spans in timeline.ranks for span in spans):
        seconds[action.kind, action.stage, action.segment].append(end - start)

    def points(stage: int, *kinds: Kind) -> list[Point]:
        """The measured points of all actions of these kinds."""
        times = [sum(median(seconds[kind, stage, i]) for kind in kinds) for i in range(len(ends))]
        return [Point(length, end - length, time) for length, end, time in zip(lengths, ends, times, strict=True)]

    costs, errors = [], []
    for stage in range(timeline.shape.num_stages):
        is_split = (Kind.W, stage, 0) in seconds
        measured = points(stage, Kind.F), points(stage, *((Kind.I, Kind.W) if is_split else (Kind.B,)))
        forward, backward = map(fit_time, measured)
        weight = fit_time(points(stage, Kind.W)) if is_split else AnalyticTime(per_token=backward.per_token / 2)
        costs.append(StageCost(forward, backward, weight, forward + backward))
        for time, found in zip((forward, backward), measured, strict=True):
            errors += relative_errors(time, found)
    return tuple(costs), FitError(mean(errors), max(errors))


def fit_time(points: Sequence[Point]) -> AnalyticTime:
    """The time with the least squares of the relative errors and no negative part."""
    rows = [
        [x / seconds for x in (1, length, length * (2 * prefix + length + 1) / 2)] for length, prefix, seconds in points
    ]
    best, least = AnalyticTime(), float("inf")
    # In segments of one length a part per token looks like a constant, which comes last because it is less likely.
    for parts in (parts for size in (3, 2, 1) for parts in combinations((1, 2, 0), size)):
        try:
            found = least_squares([[row[part] for part in parts] for row in rows], [1.0] * len(rows))
        except ValueError:  # too few segments for so many parts, or all of one length
            continue
        coefficients = dict(zip(parts, found, strict=True))
        fixed, per_token, per_pair = (coefficients.get(part, 0.0) for part in range(3))
        time = AnalyticTime(fixed, per_token, per_pair)
        error = sum(relative**2 for relative in relative_errors(time, points))
        if min(found) >= 0 and error < least - 1e-9:
            best, least = time, error
    return best
