"""The costs of segments on the stages of a model, from the trace of a step that ran (`--pipeline-trace`)."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from ...schedule import UNUSABLE, Kind, Timeline, read_timeline, reason
from .stage_costs import AnalyticTime, StageCost


class TimedSegment(NamedTuple):
    """A segment of `length` tokens after `prefix` tokens took `seconds`."""

    length: int
    prefix: int
    seconds: float


def read_traced_costs(path: str | Path, num_stages: int) -> tuple[tuple[StageCost, ...], list[float]]:
    """The cost of a segment on every stage, in seconds for a micro-batch, and its relative errors by measurement.

    Raises ValueError if the file is no trace, is of another number of stages, or has too few segments.
    """
    try:
        timeline = read_timeline(path)
        if timeline.shape.num_stages != num_stages:
            raise ValueError(f"it has {timeline.shape.num_stages} stages, the model {num_stages}")
        return traced_costs(timeline)
    except UNUSABLE as error:
        raise ValueError(
            f"--sequence-split-profile {path} is no usable trace ({reason(error)}); write one with --pipeline-trace "
            "in a run with --sequence-splits 4"
        ) from error


def traced_costs(timeline: Timeline) -> tuple[tuple[StageCost, ...], list[float]]:
    """As `read_traced_costs`, by the medians over the micro-batches. Weight gradients of whole backwards count as half
    of the part per token, since the other half of the matrix products gives input gradients."""
    lengths = timeline.meta.get("segment_lengths")
    if not lengths or len(lengths) < 2:
        raise ValueError("it does not have the lengths of at least two segments, the same in all micro-batches")
    starts = list(accumulate(lengths[:-1], initial=0))
    seconds = defaultdict(list)
    for action, start, end in (span for spans in timeline.ranks for span in spans):
        seconds[action.kind, action.stage, action.segment].append(end - start)

    def points(stage: int, *kinds: Kind) -> list[TimedSegment]:
        times = [sum(median(seconds[kind, stage, i]) for kind in kinds) for i in range(len(lengths))]
        return [TimedSegment(*point) for point in zip(lengths, starts, times, strict=True)]

    costs, errors = [], list[float]()
    for stage in range(timeline.shape.num_stages):
        is_split = (Kind.W, stage, 0) in seconds
        measured = points(stage, Kind.F), points(stage, *((Kind.I, Kind.W) if is_split else (Kind.B,)))
        forward, backward = map(fit_time, measured)
        weight = fit_time(points(stage, Kind.W)) if is_split else AnalyticTime(per_token=backward.per_token / 2)
        costs.append(StageCost(forward, backward, weight))
        for time, found in zip((forward, backward), measured, strict=True):
            errors += (abs(time(prefix, prefix + length) / taken - 1) for length, prefix, taken in found)
    return tuple(costs), errors


def fit_time(points: Sequence[TimedSegment]) -> AnalyticTime:
    """The time of no negative part with the least squares of relative errors."""
    lengths, prefixes, seconds = np.array(points, dtype=float).T
    parts = np.stack([np.ones_like(lengths), lengths, lengths * (2 * prefixes + lengths + 1) / 2], axis=1)
    rows = parts / seconds[:, None]
    scales = np.linalg.norm(rows, axis=0)  # columns of equal length make the rank independent of their units
    best, least = np.zeros(3), float("inf")
    # In segments of one length a constant looks like a part per token; it is less likely, so it comes last.
    for chosen in (list(each) for size in (3, 2, 1) for each in combinations((1, 2, 0), size)):
        found, _, rank, _ = np.linalg.lstsq(rows[:, chosen] / scales[chosen], np.ones(len(points)), rcond=1e-8)
        if rank < len(chosen) or found.min() < 0:  # too few segments, or all of one length
            continue
        coefficients = np.zeros(3)
        coefficients[chosen] = found / scales[chosen]
        error = ((rows @ coefficients - 1) ** 2).sum()
        if error < least - 1e-9:
            best, least = coefficients, error
    fixed, per_token, per_pair = best.tolist()
    return AnalyticTime(fixed, per_token, per_pair)
