"""What a segment costs on a stage, by FLOPs over throughput, and what the actions of a schedule cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...errors import ParameterError
from ...partition import SegmentTime, segment_times
from ...schedule import Costs
from .flops import head_flops, joining_flops, layer_flops
from .machine import Device, read_machine
from .model_shape import ModelShape
from .operations import BYTES

# Kernels of a layer in each direction, about: what they take to start does not shrink with a segment.
_KERNELS = 20
# FLOPs of the backward over those of the forward; flash attention computes the scores again.
_MATMUL_BACKWARD, _ATTENTION_BACKWARD = 2.0, 2.5


@dataclass(frozen=True)
class DeviceThroughput:
    """Achievable throughput of the ranks that hold one stage together (a tensor-parallel group).

    `matmul`, `attention` and `attention_backward` in FLOP/s; `memory` in elements/s, for the embedding, which is a
    lookup; `overhead` in seconds per layer, segment and direction, for what does not shrink with a segment: launches,
    small kernels, a step of the scheduler. `full_speed_rows` and `slow_attention` are those of a Device.

    Where sequences are cut depends on the ratios of these only.
    """

    matmul: float
    attention: float
    attention_backward: float
    memory: float
    overhead: float = 0.0
    full_speed_rows: int = 128
    slow_attention: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, device: Device) -> "DeviceThroughput":
        """The rates of one device."""
        return cls(
            matmul=device.peak_flops * device.matmul_efficiency,
            attention=device.peak_flops * device.flash_forward,
            attention_backward=device.peak_flops * device.flash_backward,
            memory=device.memory_bandwidth * device.memory_efficiency / BYTES,
            overhead=_KERNELS * device.kernel_latency,
            full_speed_rows=device.full_speed_rows,
            slow_attention=device.slow_attention,
        )

    def times(self, factor: float) -> "DeviceThroughput":
        """The throughput of `factor` devices together, each with the same overhead."""
        return replace(
            self,
            matmul=self.matmul * factor,
            attention=self.attention * factor,
            attention_backward=self.attention_backward * factor,
            memory=self.memory * factor,
        )


# What sequences are cut by. All GPUs count as the same, so that a laptop cuts as the cluster does.
A100, CPU_CORE = (DeviceThroughput.of(read_machine(name).device) for name in ("a100-80gb", "cpu"))


class StageTime(Protocol):
    """A SegmentTime that can be compared as a whole."""

    def __call__(self, start: int, end: int) -> float: ...

    def covers(self, other: Any) -> bool:
        """Whether no segment takes longer by `other`, of the same class."""


@dataclass(frozen=True)
class AnalyticTime:
    """Time by FLOPs over throughput: a constant, a part per token, and one per pair of a query and a key that it sees;
    in layers where it sees at most `window` keys before its own, one per pair of these."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    per_pair_in_window: float = 0.0
    window: int = 0
    slow_attention: tuple[tuple[int, float], ...] = ()

    def __call__(self, start: int, end: int) -> float:
        length = end - start
        # Every query sees the keys before the segment, and on average half of its own.
        attention = self.per_pair * length * (start + end + 1) / 2
        if self.per_pair_in_window:
            attention += self.per_pair_in_window * _pairs_in_window(start, end, self.window)
        slower = next((factor for rows, factor in self.slow_attention if length < rows), 1.0)
        return self.fixed + self.per_token * length + slower * attention

    def __add__(self, other: "AnalyticTime") -> "AnalyticTime":
        return replace(
            self,
            fixed=self.fixed + other.fixed,
            per_token=self.per_token + other.per_token,
            per_pair=self.per_pair + other.per_pair,
            per_pair_in_window=self.per_pair_in_window + other.per_pair_in_window,
            window=self.window or other.window,
            slow_attention=self.slow_attention or other.slow_attention,
        )

    def covers(self, other: "AnalyticTime") -> bool:
        """Whether no segment takes longer by `other`."""
        return (
            self.fixed >= other.fixed
            and self.per_token >= other.per_token
            and self.per_pair >= other.per_pair
            and self.per_pair_in_window >= other.per_pair_in_window
            and self.slow_attention == other.slow_attention
        )


@dataclass(frozen=True)
class StageCost:
    """Times of a segment on one stage; `weight` is the part of `backward` that gives the weight gradients of linear
    layers, `total` that of both directions."""

    forward: SegmentTime
    backward: SegmentTime
    weight: SegmentTime
    total: StageTime


def analytic_costs(
    model: ModelShape, layers_per_stage: Sequence[int], device: DeviceThroughput, recomputes_layers: bool = False
) -> tuple[StageCost, ...]:
    """The cost of a segment on every stage, in seconds for one sequence.

    The first stage also holds the embedding, the last the layers of multi-token prediction and the projection to the
    vocabulary. With `recomputes_layers` (full
    activation recomputation) the backward of a layer includes its forward. Raises ParameterError if the stages do not
    hold all layers of the model.
    """
    if sum(layers_per_stage) != model.num_layers:
        raise ParameterError(
            "{num_layers} are not the {0} layers of the pipeline stages {1}; make the stages add up to "
            "{num_layers.name}",
            sum(layers_per_stage),
            list(layers_per_stage),
            num_layers=model.num_layers,
        )
    costs, first = [], 0
    for stage, num_layers in enumerate(layers_per_stage):
        forward, backward, weight = AnalyticTime(), AnalyticTime(), AnalyticTime()
        for layer in range(first, first + num_layers):
            layer_forward, layer_backward, layer_weight = _layer(model, layer, device)
            forward += layer_forward
            weight += layer_weight
            backward += layer_backward + layer_forward if recomputes_layers else layer_backward
        if stage == 0:
            # Forward reads a row and writes it; backward adds the gradient to a row.
            forward += AnalyticTime(per_token=2 * model.hidden_size / device.memory)
            backward += AnalyticTime(per_token=3 * model.hidden_size / device.memory)
        if stage == len(layers_per_stage) - 1:
            depth = model.prediction_depth
            for _ in range(depth):  # as the last layer of the model
                layer_forward, layer_backward, layer_weight = _layer(model, model.num_layers - 1, device)
                forward += layer_forward
                weight += layer_weight
                backward += layer_backward + layer_forward if recomputes_layers else layer_backward
            products = ((1 + depth) * head_flops(model) + depth * joining_flops(model)) / device.matmul
            forward += AnalyticTime(per_token=products)
            backward += AnalyticTime(per_token=_MATMUL_BACKWARD * products)
            weight += AnalyticTime(per_token=products)
        costs.append(StageCost(forward, backward, weight, forward + backward))
        first += num_layers
    return tuple(costs)


def bottleneck_time(costs: Sequence[StageCost]) -> SegmentTime:
    """The total of the stage that takes longest for a segment: the pace of the whole pipeline."""
    times: list[StageTime] = []
    for cost in costs:  # this is called very often, so stages that never take longer than another are left out
        if not any(time.covers(cost.total) for time in times):
            times = [time for time in times if not cost.total.covers(time)] + [cost.total]
    if len(times) == 1:
        return times[0]
    return lambda start, end: max([time(start, end) for time in times])


def _pairs_in_window(start: int, end: int, window: int) -> float:
    """Keys that the tokens [start, end) see of `window` before their own, and their own."""
    # Up to token number `window` the window reaches back to the start of the sequence.
    growing = max(0, min(end, window) - start)
    return growing * (2 * start + growing + 1) / 2 + (end - start - growing) * (window + 1)


def _layer(model: ModelShape, layer: int, device: DeviceThroughput) -> tuple[AnalyticTime, AnalyticTime, AnalyticTime]:
    """Forward, backward, and of the latter the weight gradients."""
    per_token, per_pair = layer_flops(model, layer)
    window = model.window if layer in model.window_layers else None

    def time(per_token: float, per_pair: float) -> AnalyticTime:
        common = AnalyticTime(device.overhead, per_token, slow_attention=device.slow_attention)
        if window is not None:
            return replace(common, per_pair_in_window=per_pair, window=window)
        return replace(common, per_pair=per_pair)

    forward = time(per_token / device.matmul, per_pair / device.attention)
    backward = time(
        _MATMUL_BACKWARD * per_token / device.matmul,
        _ATTENTION_BACKWARD * per_pair / device.attention_backward,
    )
    # The gradient of a matrix product by its weight takes as much as that by its input.
    weight = AnalyticTime(per_token=per_token / device.matmul)
    return forward, backward, weight


def action_costs(stages: Sequence[StageCost], layers_per_stage: Sequence[int], lengths: Sequence[int]) -> Costs:
    """Times of F, I and W in the unit of `stages`, for segments of `lengths` tokens; messages take no time.

    Activation memory is counted in tokens times layers. A W keeps as much as its F did: the inputs of the linear layers
    and their output gradients are together about as large as all that the forward of a layer saves.
    """
    forward, backward, weight = (
        tuple(tuple(segment_times(lengths, getattr(stage, part))) for stage in stages)
        for part in ("forward", "backward", "weight")
    )
    inputs = tuple(
        tuple(whole - part for whole, part in zip(*rows, strict=True)) for rows in zip(backward, weight, strict=True)
    )
    held = tuple(tuple(float(layers * length) for length in lengths) for layers in layers_per_stage)
    nothing = ((0.0,) * len(lengths),) * len(stages)
    return Costs(forward, inputs, weight, nothing, nothing, held, held)
