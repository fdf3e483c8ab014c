"""The costs of segments on a stage, and of the actions of a schedule, by FLOPs over throughput or as measured.

Sequences are cut, and `auto` plans, by these times. They are smooth in the ends of a segment, and depend only on ratios
of rates, so that a laptop cuts like the cluster; `step_costs` predicts a given machine, kernel by kernel. Measured
times of the same form are fitted to the trace of a step that ran (`--pipeline-trace`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, combinations
from operator import add, ge, sub
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..files.timeline_file import read_timeline
from ..partition import SegmentTime, SlowestTime, segment_times
from ..schedule import Costs, Kind, Timeline
from .blocks import BYTES, blocks_of, head_flops, layer_flops, pairs
from .layer_bytes import keeps_logits
from .machine import Device, read_machine
from .model_shape import ModelShape
from .training_setup import ALL_BUT_ATTENTION, FULL, StageLayers, TrainingSetup, of_stages

_LEAST_SECONDS = 1e-9  # of an action in a trace
_KERNELS = 20  # of a layer in each direction, about
# FLOPs of the backward over those of the forward; flash attention computes the scores again.
_MATMUL_BACKWARD = 2.0
_ATTENTION_BACKWARD = 2.5
# The devices by which sequences are cut. All GPUs count as the same.
A100, CPU_CORE = (read_machine(name).device for name in ("a100-80gb", "cpu"))


@dataclass(frozen=True)
class AnalyticTime:
    """The seconds of the segment [start, end), by FLOPs over throughput: a constant, a part per token, and one per pair
    of a query and a key, of all keys and of those in a window of `window` keys. `slow_attention` is as in Device."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    per_pair_in_window: float = 0.0
    window: int = 0
    slow_attention: tuple[tuple[int, float], ...] = ()

    def __call__(self, start: int, end: int) -> float:
        length = end - start
        attention = self.per_pair * length * (start + end + 1) / 2
        if self.per_pair_in_window:
            attention += self.per_pair_in_window * pairs(start, end, self.window)
        if self.slow_attention:  # this is called very often
            attention *= next((factor for rows, factor in self.slow_attention if length < rows), 1.0)
        return self.fixed + self.per_token * length + attention

    def before(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The time of all tokens before each position, without the constant, if attention is never slow."""
        seconds = self.per_token * positions + self.per_pair * (positions * (positions + 1) / 2)
        if self.per_pair_in_window:
            growing = np.minimum(positions, self.window)  # tokens that see the start of the sequence
            in_window = growing * (growing + 1) / 2 + (positions - growing) * (self.window + 1)
            seconds += self.per_pair_in_window * in_window
        return seconds

    @property
    def _parts(self) -> tuple[float, ...]:
        return self.fixed, self.per_token, self.per_pair, self.per_pair_in_window

    def __add__(self, other: "AnalyticTime") -> "AnalyticTime":
        fixed, token, pair, in_window = map(add, self._parts, other._parts)
        window = self.window or other.window
        slow = self.slow_attention or other.slow_attention
        return AnalyticTime(fixed, token, pair, in_window, window, slow)

    def covers(self, other: "AnalyticTime") -> bool:
        """Whether no segment takes longer by `other`."""
        return all(map(ge, self._parts, other._parts)) and self.slow_attention == other.slow_attention


class StageCost(NamedTuple):
    """The times of a segment on a stage; `weight` is the part of `backward` for weight gradients of linear layers."""

    forward: AnalyticTime = AnalyticTime()
    backward: AnalyticTime = AnalyticTime()
    weight: AnalyticTime = AnalyticTime()

    @property
    def total(self) -> AnalyticTime:
        return self.forward + self.backward


@lru_cache(maxsize=1024)
def analytic_costs(
    model: ModelShape,
    layers_per_stage: tuple[int, ...],
    device: Device,
    recompute: str = "none",
    num_devices: float = 1.0,
    loss_in_pieces: bool = False,
) -> tuple[StageCost, ...]:
    """Seconds of a segment of one sequence on every stage, if `num_devices` share it; `recompute` as in TrainingSetup.
    With `loss_in_pieces` the backward computes the logits again, and the projection's weight gradient in place of W."""
    lookup = BYTES * model.hidden_size / (num_devices * device.memory_bandwidth * device.memory_efficiency)
    products = head_flops(model) / (num_devices * device.peak_flops * device.matmul_efficiency)
    # The forward reads a row and writes it; the backward adds the gradient to a row.
    embedding = StageCost(AnalyticTime(per_token=2 * lookup), AnalyticTime(per_token=3 * lookup))
    head = StageCost(
        forward=AnalyticTime(per_token=products),
        backward=AnalyticTime(per_token=_MATMUL_BACKWARD * products),
        weight=AnalyticTime(per_token=products),
    )
    if loss_in_pieces:
        head = StageCost(
            forward=head.forward,
            backward=AnalyticTime(per_token=(_MATMUL_BACKWARD + 1) * products),
            weight=AnalyticTime(),
        )

    def cost_of(stage: StageLayers) -> StageCost:
        parts: list[StageCost] = []
        for layer, count in stage.layers:
            parts += [_layer(model, layer, device, recompute, num_devices)] * count
        if stage.is_first:
            parts.append(embedding)
        if stage.is_last:
            parts.append(head)
        return StageCost(
            forward=sum((part.forward for part in parts), AnalyticTime()),
            backward=sum((part.backward for part in parts), AnalyticTime()),
            weight=sum((part.weight for part in parts), AnalyticTime()),
        )

    return tuple(of_stages(model, layers_per_stage, cost_of))


def setup_costs(setup: TrainingSetup, device: Device = A100) -> tuple[StageCost, ...]:
    """`analytic_costs` of a set-up, by which training cuts and plans, whatever the machine."""
    return analytic_costs(*_arguments_of(setup, device))


def setup_pace(setup: TrainingSetup) -> SegmentTime:
    """`bottleneck_time` of a set-up, by which a search cuts many with equal costs."""
    return _bottleneck_of(*_arguments_of(setup, A100))


def _arguments_of(setup: TrainingSetup, device: Device) -> tuple[Any, ...]:
    """What a set-up gives `analytic_costs`."""
    recompute = setup.recompute if setup.recomputes_layers else "none"  # modules alone count as nothing
    devices = setup.tensor_parallel / setup.micro_batch_size  # sequences of a micro-batch add to the work
    return setup.model, setup.layers_per_stage, device, recompute, devices, not keeps_logits(setup)


@lru_cache(maxsize=1024)
def _bottleneck_of(*arguments: Any) -> SegmentTime:
    return bottleneck_time(analytic_costs(*arguments))


def bottleneck_time(costs: Sequence[StageCost]) -> SegmentTime:
    """The time of the slowest stage for a segment: the pace of the whole pipeline."""
    times: list[AnalyticTime] = []  # only those that matter, since the result is called very often
    for total in dict.fromkeys(cost.total for cost in costs):
        if not any(time.covers(total) for time in times):
            times = [time for time in times if not total.covers(time)] + [total]
    if any(time.slow_attention for time in times):
        return lambda start, end: max([time(start, end) for time in times])
    return SlowestTime(tuple(times))


def _layer(model: ModelShape, layer: int, device: Device, recompute: str, num_devices: float) -> StageCost:
    of_token, of_pair = layer_flops(model, layer)  # FLOPs
    window = model.window_of(layer)
    rate = num_devices * device.peak_flops
    matmul = rate * device.matmul_efficiency
    per_token = of_token / matmul

    def time(per_token: float, per_pair: float) -> AnalyticTime:
        whole = AnalyticTime(
            fixed=_KERNELS * device.kernel_latency,
            per_token=per_token,
            per_pair=per_pair,
            slow_attention=device.slow_attention,
        )
        if window is None:
            return whole
        return replace(whole, per_pair=0.0, per_pair_in_window=per_pair, window=window)

    forward = time(per_token, of_pair / (rate * device.flash_forward))
    backward = time(_MATMUL_BACKWARD * per_token, _ATTENTION_BACKWARD * of_pair / (rate * device.flash_backward))
    if recompute == FULL:
        backward += forward
    elif recompute == ALL_BUT_ATTENTION:
        backward += replace(forward, per_pair=0.0, per_pair_in_window=0.0)
    # The gradients of a product by its weight and by its input take equally long; a recurrence has no weight.
    scans = sum(block.scan for block in blocks_of(model, layer)) / matmul
    return StageCost(forward, backward, AnalyticTime(per_token=per_token - scans))


def action_costs(stages: Sequence[StageCost], layers_per_stage: Sequence[int], lengths: Sequence[int]) -> Costs:
    """Times of F, I and W in the unit of `stages`, for segments of `lengths` tokens; messages take no time. Activation
    memory is in tokens times layers; W needs inputs and output gradients, about as much as F keeps."""
    forwards = []
    inputs = []
    weights = []
    for stage in stages:
        backward = segment_times(lengths, stage.backward)
        weight = segment_times(lengths, stage.weight)
        forwards.append(tuple(segment_times(lengths, stage.forward)))
        inputs.append(tuple(map(sub, backward, weight)))
        weights.append(tuple(weight))
    held = tuple(tuple(float(layers * length) for length in lengths) for layers in layers_per_stage)
    nothing = ((0.0,) * len(lengths),) * len(stages)
    return Costs(
        f=tuple(forwards),
        i=tuple(inputs),
        w=tuple(weights),
        message_f=nothing,
        message_b=nothing,
        activation=held,
        activation_for_w=held,
    )


class TimedSegment(NamedTuple):
    """A segment of `length` tokens after `prefix` tokens took `seconds`."""

    length: int
    prefix: int
    seconds: float


class TracedCosts(NamedTuple):
    """The cost of a segment of a micro-batch on every stage, in seconds, and how far off it is: the relative error of
    each forward and backward that it is fitted to."""

    stages: tuple[StageCost, ...]
    errors: list[float]


def read_traced_costs(path: str | Path, num_stages: int) -> TracedCosts:
    """The costs by the trace in a file. Raises ValueError if the file is no trace, is of another number of stages, or
    has too few segments."""
    timeline = read_timeline(path)
    try:
        if timeline.shape.num_stages != num_stages:
            raise ValueError(f"it has {timeline.shape.num_stages} stages, the model {num_stages}")
        return traced_costs(timeline)
    except ValueError as error:
        way_out = "write another with --pipeline-trace in a run with --sequence-splits 4"
        raise ValueError(f"{path}: {error}; {way_out}") from error


def traced_costs(timeline: Timeline) -> TracedCosts:
    """The costs by the medians over the micro-batches of a trace. Weight gradients of whole backwards count as half of
    the part per token, since the other half of the matrix products gives input gradients. Raises ValueError for a trace
    with too few segments."""
    lengths = timeline.meta.get("segment_lengths")
    if not lengths or len(lengths) < 2:
        raise ValueError("it does not have the lengths of at least two segments, the same in all micro-batches")
    starts = list(accumulate(lengths[:-1], initial=0))
    seconds = defaultdict(list)
    for rank, spans in enumerate(timeline.ranks):
        paired = timeline.paired(rank)
        for action, start, end in spans:
            if action not in paired:
                seconds[action.kind, action.stage, action.segment].append(end - start)

    def taken(kind: Kind, stage: int, segment: int) -> float:
        found = median(seconds.get((kind, stage, segment), [0.0]))
        if found < _LEAST_SECONDS:
            raise ValueError(f"{kind} of segment {segment} on stage {stage} takes no time in it")
        return found

    def points(stage: int, *kinds: Kind) -> list[TimedSegment]:
        times = [sum(taken(kind, stage, segment) for kind in kinds) for segment in range(len(lengths))]
        return [
            TimedSegment(length, prefix, seconds)
            for length, prefix, seconds in zip(lengths, starts, times, strict=True)
        ]

    costs = []
    errors = list[float]()
    for stage in range(timeline.shape.num_stages):
        is_split = (Kind.W, stage, 0) in seconds
        forward_points = points(stage, Kind.F)
        backward_points = points(stage, Kind.I, Kind.W) if is_split else points(stage, Kind.B)
        forward = fit_time(forward_points)
        backward = fit_time(backward_points)
        weight = fit_time(points(stage, Kind.W)) if is_split else AnalyticTime(per_token=backward.per_token / 2)
        costs.append(StageCost(forward, backward, weight))
        errors += _errors(forward, forward_points)
        errors += _errors(backward, backward_points)
    return TracedCosts(tuple(costs), errors)


def _errors(time: AnalyticTime, points: Sequence[TimedSegment]) -> list[float]:
    """The relative errors of a fitted time."""
    predicted = [time(point.prefix, point.prefix + point.length) for point in points]
    return [abs(seconds / point.seconds - 1) for seconds, point in zip(predicted, points, strict=True)]


def fit_time(points: Sequence[TimedSegment]) -> AnalyticTime:
    """The time with the least squares of relative errors among those of which no part is negative."""
    lengths, prefixes, seconds = np.array(points, dtype=float).T
    parts = np.stack([np.ones_like(lengths), lengths, lengths * (2 * prefixes + lengths + 1) / 2], axis=1)
    rows = parts / seconds[:, None]
    scales = np.linalg.norm(rows, axis=0)  # columns of equal length make the rank independent of their units
    best = np.zeros(3)
    least = float("inf")
    # In segments of one length a constant looks like a part per token; it is less likely, so it comes last.
    for columns in chain.from_iterable(combinations((1, 2, 0), size) for size in (3, 2, 1)):
        chosen = list(columns)
        found, _, rank, _ = np.linalg.lstsq(rows[:, chosen] / scales[chosen], np.ones(len(points)), rcond=1e-8)
        if rank < len(chosen) or found.min() < 0:  # too few segments, or all of one length
            continue
        coefficients = np.zeros(3)
        coefficients[chosen] = found / scales[chosen]
        error = ((rows @ coefficients - 1) ** 2).sum()
        if error < least - 1e-9:
            best = coefficients
            least = error
    fixed, per_token, per_pair = best.tolist()
    return AnalyticTime(fixed, per_token, per_pair)
