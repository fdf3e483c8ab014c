"""What a segment costs on a stage, by FLOPs over throughput, and what the actions of a schedule cost.

Sequences are cut, and `auto` plans, by these times. They are smooth in the ends of a segment, as a search for cuts
needs, and depend on ratios of rates only, so that a laptop cuts as the cluster does; `step_costs` predicts the seconds
of a given machine, kernel by kernel, for segments that are cut. FLOPs and blocks are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ...partition import SegmentTime, segment_times
from ...schedule import Costs
from .blocks import BYTES, blocks_of
from .flops import head_flops, layer_flops, pairs
from .layer_bytes import keeps_logits
from .machine import Device, read_machine
from .model_shape import ModelShape
from .training_setup import ALL_BUT_ATTENTION, FULL, TrainingSetup

# Kernels of a layer in each direction, about: what they take to start does not shrink with a segment.
_KERNELS = 20
# FLOPs of the backward over those of the forward; flash attention computes the scores again.
_MATMUL_BACKWARD, _ATTENTION_BACKWARD = 2.0, 2.5

# What sequences are cut by. All GPUs count as the same.
A100, CPU_CORE = (read_machine(name).device for name in ("a100-80gb", "cpu"))


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
            attention += self.per_pair_in_window * pairs(start, end, self.window)
        if self.slow_attention:  # this is called very often
            attention *= next((factor for rows, factor in self.slow_attention if length < rows), 1.0)
        return self.fixed + self.per_token * length + attention

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
    layers, `total` is both directions together."""

    forward: AnalyticTime
    backward: AnalyticTime
    weight: AnalyticTime

    @cached_property
    def total(self) -> AnalyticTime:
        return self.forward + self.backward


def analytic_costs(
    model: ModelShape,
    layers_per_stage: Sequence[int],
    device: Device,
    recompute: str = "none",
    num_devices: float = 1.0,
    loss_in_pieces: bool = False,
) -> tuple[StageCost, ...]:
    """The cost of a segment on every stage, in seconds for one sequence, where `num_devices` share its work.

    The first stage also holds the embedding, the last the layers of multi-token prediction and the projections to the
    vocabulary. Layers that `recompute` (as in TrainingSetup) repeats count in their backward. With `loss_in_pieces` the
    backward also has the logits that it computes again and the weight gradient of the projection, which no W can take.
    Raises ValueError if the stages do not hold all layers of the model.
    """
    if sum(layers_per_stage) != model.num_layers:
        raise ValueError(
            f"--num-layers {model.num_layers} are not the {sum(layers_per_stage)} layers of the pipeline stages "
            f"{list(layers_per_stage)}; make the stages add up to --num-layers"
        )
    matmul = num_devices * device.peak_flops * device.matmul_efficiency
    lookup = BYTES * model.hidden_size / (num_devices * device.memory_bandwidth * device.memory_efficiency)
    last = len(layers_per_stage) - 1
    costs, first = [], 0
    for stage, num_layers in enumerate(layers_per_stage):
        forward, backward, weight = AnalyticTime(), AnalyticTime(), AnalyticTime()
        layers = [*range(first, first + num_layers)]
        if stage == last:
            layers += [model.num_layers - 1] * model.prediction_depth  # as the last layer of the model
        for layer in layers:
            layer_forward, layer_backward, layer_weight = _layer(model, layer, device, num_devices)
            forward += layer_forward
            weight += layer_weight
            backward += layer_backward
            if recompute == FULL:
                backward += layer_forward
            elif recompute == ALL_BUT_ATTENTION:
                backward += replace(layer_forward, per_pair=0.0, per_pair_in_window=0.0)
        if stage == 0:
            # Forward reads a row and writes it; backward adds the gradient to a row.
            forward += AnalyticTime(per_token=2 * lookup)
            backward += AnalyticTime(per_token=3 * lookup)
        if stage == last:
            products = head_flops(model) / matmul
            forward += AnalyticTime(per_token=products)
            backward += AnalyticTime(per_token=(_MATMUL_BACKWARD + loss_in_pieces) * products)
            if not loss_in_pieces:
                weight += AnalyticTime(per_token=products)
        costs.append(StageCost(forward, backward, weight))
        first += num_layers
    return tuple(costs)


_analytic_costs = lru_cache(maxsize=1024)(analytic_costs)


def setup_costs(setup: TrainingSetup, device: Device = A100) -> tuple[StageCost, ...]:
    """`analytic_costs` of a set-up: training cuts and plans by these, whatever the machine."""
    devices = setup.tensor_parallel / setup.micro_batch_size  # sequences of a micro-batch add to the work
    pieces = not keeps_logits(setup)
    return _analytic_costs(setup.model, setup.layers_per_stage, device, setup.recompute, devices, pieces)


def bottleneck_time(costs: Sequence[StageCost]) -> SegmentTime:
    """The total of the stage that takes longest for a segment: the pace of the whole pipeline."""
    times: list[AnalyticTime] = []
    for cost in costs:  # this is called very often, so stages that never take longer than another are left out
        if not any(time.covers(cost.total) for time in times):
            times = [time for time in times if not cost.total.covers(time)] + [cost.total]
    if len(times) == 1:
        return times[0]
    return lambda start, end: max([time(start, end) for time in times])


def _layer(
    model: ModelShape, layer: int, device: Device, num_devices: float
) -> tuple[AnalyticTime, AnalyticTime, AnalyticTime]:
    """Forward, backward, and of the latter the weight gradients."""
    (of_token, of_pair), window = layer_flops(model, layer), model.window_of(layer)
    rate = num_devices * device.peak_flops
    per_token = of_token / (rate * device.matmul_efficiency)

    def time(per_token: float, per_pair: float) -> AnalyticTime:
        common = AnalyticTime(_KERNELS * device.kernel_latency, per_token, slow_attention=device.slow_attention)
        if window is not None:
            return replace(common, per_pair_in_window=per_pair, window=window)
        return replace(common, per_pair=per_pair)

    forward = time(per_token, of_pair / (rate * device.flash_forward))
    backward = time(_MATMUL_BACKWARD * per_token, _ATTENTION_BACKWARD * of_pair / (rate * device.flash_backward))
    # The gradient of a matrix product by its weight takes as much as that by its input; a recurrence has no weight.
    scans = sum(block.scan for block in blocks_of(model, layer)) / (rate * device.matmul_efficiency)
    return forward, backward, AnalyticTime(per_token=per_token - scans)


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
