"""The times of the actions of a training step on a machine, and of what follows the last of them. Seconds.

Tested in planner/test_search.py by test_bounds_are_bounds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, singledispatch
from heapq import heapify, heapreplace
from itertools import chain, pairwise
from math import ceil
from operator import add
from typing import NamedTuple

from ..schedule import Costs, Placement
from ..schedule.cost_tables import Table
from .blocks import BYTES, Parameters
from .context_exchange import BothPasses
from .layer_bytes import stage_moved
from .layer_times import (
    LayerTime,
    Seconds,
    embedding_time,
    head_time,
    layer_times,
    layers_with_experts,
    repeated_time,
)
from .machine import Machine
from .training_setup import Fsdp, Moves, StageLayers, TrainingSetup, of_stages

# Launches for the biases of an expert, which Megatron adds one expert after the other (TEGroupedMLP._apply_bias), to
# those for all else: two to 16 in the forward; in the backward, with sums of gradients, ten to 32.
_BIASES_FORWARD = 2 / 16
_BIASES_BACKWARD = 10 / 32

Row = tuple[float, ...]  # by segment, unless it says otherwise


class StageRows(NamedTuple):
    """Seconds of the actions of one stage, by segment."""

    f: Row
    i: Row
    w: Row


@lru_cache(maxsize=8192)
def _times_with_recomputation(setup: TrainingSetup, machine: Machine, layer: int) -> tuple[LayerTime, ...]:
    """The times of a layer by segment; what is computed again counts as products of the input gradients."""
    times = layer_times(setup, machine, layer)
    if setup.recompute == "none":
        return times
    repeated = (
        repeated_time(setup, machine, *span, layer, time.forward) for span, time in zip(setup.spans, times, strict=True)
    )
    return tuple(
        time._replace(input=time.input._replace(matmul=time.input.matmul + again))
        for time, again in zip(times, repeated, strict=True)
    )


@lru_cache(maxsize=8192)
def _seconds_of_layer(setup: TrainingSetup, machine: Machine, layer: int) -> tuple[Seconds, ...]:
    """The seconds of a layer, by segment; stages share them."""
    times = _times_with_recomputation(setup, machine, layer)
    return tuple(Seconds(time.forward.total, time.input.total, time.weight) for time in times)


def _seconds_of_parts(
    setup: TrainingSetup, machine: Machine, stage: StageLayers
) -> list[tuple[int, tuple[Seconds, ...]]]:
    """The number and the seconds, by segment, of each kind of layer of a stage, of its embedding and of its loss."""
    parts = [(count, _seconds_of_layer(setup.time_setup, machine, layer)) for layer, count in stage.layers]
    if stage.is_first:
        parts.append((1, _seconds_of_embedding(setup.activation_setup, machine)))
    if stage.is_last:
        parts.append((1, _seconds_of_head(setup.activation_setup, machine)))
    return parts


@lru_cache(maxsize=8192)
def _seconds_of_embedding(setup: TrainingSetup, machine: Machine) -> tuple[Seconds, ...]:
    """The seconds of the embedding, by segment."""
    return tuple(embedding_time(setup, machine, *span) for span in setup.spans)


@lru_cache(maxsize=8192)
def _seconds_of_head(setup: TrainingSetup, machine: Machine) -> tuple[Seconds, ...]:
    """The seconds of the projection to the vocabulary and the loss, by segment."""
    return tuple(head_time(setup, machine, *span) for span in setup.spans)


def launch_times(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> BothPasses:
    """What the host needs for the kernels of a stage; graphs take it no time."""
    num_layers = 0 if setup.replays_layers else sum(count for _, count in stage.layers)
    of_experts = _launches_of_experts(setup, machine, stage)
    forward = num_layers * machine.host.layer_forward + of_experts.forward
    backward = num_layers * machine.host.layer_backward + of_experts.backward
    if setup.recomputes_layers:
        backward += forward
    elif setup.repeats("E"):
        backward += of_experts.forward
    return BothPasses(forward, backward)


def _launches_of_experts(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> BothPasses:
    """What the host needs for the experts of a rank, one after the other."""
    experts = setup.model.experts
    if experts is None:
        return BothPasses(0.0, 0.0)
    layers = layers_with_experts(setup.model, stage)
    forward = layers * experts.total / setup.expert_parallel * machine.host.expert
    backward = 2 * forward
    if setup.model.has_biases:
        forward *= 1 + _BIASES_FORWARD
        backward *= 1 + _BIASES_BACKWARD
    return BothPasses(forward, backward)


class _Work(NamedTuple):
    """Seconds of what a forward or a backward of a segment does at once; it takes as long as the longest."""

    compute: float  # of the device
    launches: float  # of the host
    copies: float  # to the host or back, of what Megatron moves of every unit
    collectives: float  # of sharded parameters and gradients

    @property
    def waits_for_launches(self) -> bool:
        """Whether the host takes longest."""
        return self.launches >= max(self)


class _Passes(NamedTuple):
    """Both directions of a segment on a stage; `weight` is the part of the backward's compute that gives the gradients
    of weights."""

    forward: _Work
    backward: _Work
    weight: float


def _passes_of_stage(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> Iterator[_Passes]:
    """The passes of each segment, without what the host needs for an action."""
    parts = _seconds_of_parts(setup, machine, stage)
    launching = launch_times(setup, machine, stage)
    collectives = _collectives_of_stage(setup, machine, stage)
    for index, span in enumerate(setup.spans):
        forward = back = weight = 0.0
        for count, of_segments in parts:
            seconds = of_segments[index]
            forward += count * seconds.forward
            back += count * seconds.input
            weight += count * seconds.weight
        copies = _copies_of_stage(setup, machine, stage, span)
        yield _Passes(
            forward=_Work(
                compute=forward,
                launches=launching.forward,
                copies=copies.forward,
                collectives=collectives.forward,
            ),
            backward=_Work(
                compute=back + weight,
                launches=launching.backward,
                copies=copies.backward,
                collectives=collectives.backward,
            ),
            weight=weight,
        )


@lru_cache(maxsize=1 << 15)
def _collectives_of_stage(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> BothPasses:
    """Seconds in which sharded parameters are gathered, in both directions, and sharded gradients reduced."""
    if not setup.shards_gradients:
        return BothPasses(0.0, 0.0)
    reduce, gather = replica_times(setup, machine, setup.stage_parameters(stage))
    if not setup.shards_parameters:
        gather = 0.0
    return BothPasses(gather, gather + reduce)


def _copies_of_stage(setup: TrainingSetup, machine: Machine, stage: StageLayers, span: tuple[int, int]) -> BothPasses:
    """Seconds of the copies that a segment waits for, of what Megatron moves of every unit. A forward waits for those
    of all layers but the last two, which may be on their way at its end; for those of whole layers, all: Transformer
    Engine frees a layer only when it has moved."""
    copied = stage_moved(setup, stage, *span) if setup.moves_parts else 0.0
    if not copied:
        return BothPasses(0.0, 0.0)
    copying = copied / machine.device.host_bandwidth
    num_layers = sum(count for _, count in stage.layers)
    on_their_way = 0.0 if setup.moves is Moves.LAYERS else min(1.0, 2 / max(1, num_layers))
    return BothPasses(copying * (1 - on_their_way), copying)


@lru_cache(maxsize=1 << 14)
def waits_for_launches(layer_setup: TrainingSetup, machine: Machine) -> bool:
    """Whether the device waits for its host in some layer."""
    (all_layers,) = layer_setup.stages
    for layer, _ in all_layers.layers:
        passes = _passes_of_stage(layer_setup, machine, StageLayers.of_layer(layer))
        if any(both.forward.waits_for_launches or both.backward.waits_for_launches for both in passes):
            return True
    return False


@lru_cache(maxsize=1 << 15)
def rows_of_stage(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> StageRows:
    """The seconds of the actions of one stage. Where backwards are split, W has the share of the whole backward that it
    has of the backward's compute."""
    action = machine.host.action
    f = []
    i = []
    w = []
    for forward, backward, weight in _passes_of_stage(setup, machine, stage):
        total = max(backward) + action
        if setup.splits_backward and weight:
            weight *= (total - action) / backward.compute
        f.append(max(forward) + action)
        i.append(total - weight)
        w.append(weight)
    return StageRows(tuple(f), tuple(i), tuple(w))


class StageSums(NamedTuple):
    """Seconds of all segments on one stage. Each field of both includes what the host needs for the actions."""

    forward: _Work
    backward: _Work


@lru_cache(maxsize=1 << 15)
def sums_of_stage(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> StageSums:
    """The sums over the segments of a stage. The longest entry is a lower bound for every cut into as many segments: in
    another cut the device may compute longer than the host launches in all segments, here in some."""
    forward = backward = 0.0
    for count, of_segments in _seconds_of_parts(setup, machine, stage):
        seconds = _summed(of_segments)
        forward += count * seconds.forward
        backward += count * (seconds.input + seconds.weight)
    launching = launch_times(setup, machine, stage)
    collectives = _collectives_of_stage(setup, machine, stage)
    copies_forward = copies_backward = 0.0
    if setup.moves_parts:
        for span in setup.spans:
            copies = _copies_of_stage(setup, machine, stage, span)
            copies_forward += copies.forward
            copies_backward += copies.backward
    segments = len(setup.segments)
    actions = segments * machine.host.action
    return StageSums(
        forward=_Work(
            compute=actions + forward,
            launches=actions + segments * launching.forward,
            copies=actions + copies_forward,
            collectives=actions + segments * collectives.forward,
        ),
        backward=_Work(
            compute=actions + backward,
            launches=actions + segments * launching.backward,
            copies=actions + copies_backward,
            collectives=actions + segments * collectives.backward,
        ),
    )


@lru_cache(maxsize=1 << 14)
def _summed(of_segments: tuple[Seconds, ...]) -> Seconds:
    """The seconds of all segments; stages and set-ups share them."""
    return Seconds(*map(sum, zip(*of_segments, strict=True)))


@lru_cache(maxsize=1 << 15)
def first_passes(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> BothPasses:
    """Seconds of the forward and of the backward of the first segment on a stage."""
    first = next(_passes_of_stage(setup, machine, stage))
    action = machine.host.action
    return BothPasses(max(first.forward) + action, max(first.backward) + action)


def stage_rows(setup: TrainingSetup, machine: Machine) -> Sequence[StageRows]:
    """The rows of every stage."""
    return rows_of_stages(setup.layer_setup, machine, setup.layers_per_stage)


@lru_cache(maxsize=8192)
def rows_of_stages(
    layer_setup: TrainingSetup, machine: Machine, layers_per_stage: tuple[int, ...]
) -> Sequence[StageRows]:
    """The rows of every stage of a model whose stages have these numbers of layers; see `TrainingSetup.layer_setup`."""
    if layer_setup.parts:
        of_parts = [rows_of_stages(part, machine, layers_per_stage) for part in layer_setup.parts]
        return [StageRows(*joined_rows(of_stage)) for of_stage in zip(*of_parts, strict=True)]
    return of_stages(layer_setup.model, layers_per_stage, lambda stage: rows_of_stage(layer_setup, machine, stage))


def joined_rows(parts: Iterable[Iterable[Row]]) -> list[Row]:
    """The rows of a stage from those of each kind of micro-batch, one kind after the other."""
    return [tuple(chain(*of_parts)) for of_parts in zip(*parts, strict=True)]


def balanced_layers(setup: TrainingSetup, placement: Placement, machine: Machine, least: int = 1) -> tuple[int, ...]:
    """Layers for each stage, at least `least`, with the shortest time of the slowest rank, and then stage, embedding
    and loss included. Later stages get more among equal ones, since fewer units are in flight there."""
    return _balanced(setup.layer_setup, placement, machine, least)


@lru_cache(maxsize=1 << 16)
def _balanced(layer_setup: TrainingSetup, placement: Placement, machine: Machine, least: int) -> tuple[int, ...]:
    seconds = _loads(layer_setup, machine)
    loads_of_ranks = [(least * seconds.layer,) * placement.num_chunks] * placement.num_ranks
    for stage, load in ((0, seconds.embedding), (placement.num_stages - 1, seconds.loss)):
        rank = placement.rank_of(stage)
        loads = list(loads_of_ranks[rank])
        loads[placement.chunk_of(stage)] += load
        loads_of_ranks[rank] = tuple(loads)
    more = layer_setup.model.num_layers - least * placement.num_stages
    more_of_ranks = _dealt(more, seconds.layer, [*map(sum, loads_of_ranks)])
    counts = [least] * placement.num_stages
    dealt_to: dict[tuple[int, tuple[float, ...]], list[int]] = {}  # all ranks inside have the same loads
    for rank, (more_of_rank, loads_of_rank) in enumerate(zip(more_of_ranks, loads_of_ranks, strict=True)):
        alike = (more_of_rank, loads_of_rank)
        if alike not in dealt_to:
            dealt_to[alike] = _dealt(more_of_rank, seconds.layer, loads_of_rank)
        for stage, more_of_stage in zip(placement.stages_of(rank), dealt_to[alike], strict=True):
            counts[stage] += more_of_stage
    return tuple(counts)


def _dealt(number: int, layer: float, loads: Sequence[float]) -> list[int]:
    """How many of so many layers, of `layer` seconds, come to each of some places with these loads: one after the other
    to where the load is least, of equal places the last."""
    # Once no place has less than the highest load had, all get one layer in each round.
    highest = max(loads)
    until_level = sum(ceil((highest - load) / layer) for load in loads)
    rounds = max(0, number - until_level) // len(loads)
    counts = [rounds] * len(loads)
    waiting = [(load, -place) for place, load in enumerate(loads)]
    heapify(waiting)
    for _ in range(number - rounds * len(loads)):
        load, place = waiting[0]
        counts[-place] += 1
        heapreplace(waiting, (load + layer, place))
    return counts


class _Loads(NamedTuple):
    """Seconds of all segments of a micro-batch, forward and backward."""

    layer: float  # a mean layer of the model
    embedding: float
    loss: float  # with the projection to the vocabulary


@lru_cache(maxsize=8192)
def _loads(layer_setup: TrainingSetup, machine: Machine) -> _Loads:
    (whole_model,) = layer_setup.stages
    all_layers = _seconds_of_rows(layer_setup, machine, StageLayers(whole_model.layers, is_first=False, is_last=False))
    without = layer_setup.without_recomputation()  # of the embedding and the loss nothing is computed again
    return _Loads(
        layer=all_layers / layer_setup.model.num_layers,
        embedding=_seconds_of_rows(without, machine, StageLayers((), is_first=True, is_last=False)),
        loss=_seconds_of_rows(without, machine, StageLayers((), is_first=False, is_last=True)),
    )


def _seconds_of_rows(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> float:
    """Seconds of all actions of a stage."""
    return sum(map(sum, rows_of_stage(setup, machine, stage)))


@singledispatch
@lru_cache(maxsize=256)
def step_costs(setup: TrainingSetup, machine: Machine) -> Costs:
    """Times in seconds; costs have no memory here, which step_memory counts."""
    rows = stage_rows(setup, machine)
    messages = message_times(setup, machine, setup.tensor_parallel)
    nothing = ((0.0,) * len(setup.segments),) * len(setup.stages)
    return Costs(
        f=tuple(row.f for row in rows),
        i=tuple(row.i for row in rows),
        w=tuple(row.w for row in rows),
        message_f=messages.to_next,
        message_b=messages.to_previous,
        activation=nothing,
        activation_for_w=nothing,
    )


class MessageTimes(NamedTuple):
    """Seconds of the messages to the stages beside each stage, by stage and segment."""

    to_next: Table
    to_previous: Table


def message_times(setup: TrainingSetup, machine: Machine, parts: int) -> MessageTimes:
    """Seconds from the end of an action until its message has arrived. `parts` tensor-parallel ranks send a part each;
    without sequence parallelism the receivers gather the parts."""
    senders = max(1, min(machine.devices_per_node, setup.pipeline_stride) * parts // setup.tensor_parallel)
    ranks = map(setup.placement.rank_of, range(setup.placement.num_stages))
    nodes = [rank * setup.pipeline_stride // machine.devices_per_node for rank in ranks]
    sizes = [setup.whole_input(length) for length in setup.segments]

    @cache
    def row(is_inside_node: bool) -> Row:
        destination = 0 if is_inside_node else machine.devices_per_node
        times = (machine.message_time(0, destination, size / parts, senders) for size in sizes)
        if setup.sequence_parallel:
            return tuple(times)
        gathered = (machine.all_gather_time(setup.tensor_group, size) for size in sizes)
        return tuple(map(add, times, gathered))

    nothing = (0.0,) * len(setup.segments)
    between = [row(earlier == later) for earlier, later in pairwise(nodes)]
    return MessageTimes(to_next=(*between, nothing), to_previous=(nothing, *between))


class ReplicaTimes(NamedTuple):
    """Seconds of what replicas exchange."""

    reduce: float  # sums of gradients
    gather: float  # parameters, where the state of the optimizer is sharded


def replica_times(setup: TrainingSetup, machine: Machine, parameters: Parameters) -> ReplicaTimes:
    """The exchanges for so many parameters of a rank. FSDP sums gradients in 16 bit (--megatron-fsdp-grad-comm-dtype
    bf16)."""
    reduce = gather = 0.0
    gradient = setup.gradient_bytes if setup.fsdp is Fsdp.OFF else BYTES
    for group, count in ((setup.data_group, parameters.dense), (setup.expert_data_group, parameters.routed)):
        if count and setup.distributed_optimizer:
            reduce += machine.all_gather_time(group, gradient * count)
            gather += machine.all_gather_time(group, BYTES * count)
        elif count:
            reduce += machine.all_reduce_time(group, setup.gradient_bytes * count)
    return ReplicaTimes(reduce, gather)


@dataclass(frozen=True)
class StepEnd:
    """What follows the pipeline on the ranks of one pipeline rank: sums of gradients, Adam, and gathered parameters."""

    reduce: float
    update: float
    gather: float


def step_end(setup: TrainingSetup, machine: Machine, rank: int) -> StepEnd:
    """Seconds of what follows the pipeline on a rank. With `overlaps_data_parallel` the schedule has the sums and
    gathers, except sums of an embedding on two stages."""
    return _step_end(setup.state_setup, machine, rank)


@lru_cache(maxsize=1 << 15)
def _step_end(setup: TrainingSetup, machine: Machine, rank: int) -> StepEnd:
    """The same; set-ups that differ in their activations alone share it."""
    stages = setup.placement.stages_of(rank)
    chunks = [setup.parameters[stage] for stage in stages]
    parameters = Parameters(
        dense=sum(chunk.dense for chunk in chunks),
        routed=sum(chunk.routed for chunk in chunks),
    )
    reduce = gather = 0.0
    if setup.shards_gradients:
        # The first layer has nothing to be gathered beside, the last gradients nothing to be reduced beside.
        layers = [layer for stage in stages for layer, _ in setup.stages[stage].layers]
        largest = max((setup.layer_parameters(layer) for layer in layers), key=sum, default=Parameters(0.0, 0.0))
        reduce, gather = replica_times(setup, machine, largest)
        if not setup.shards_parameters:  # the schedule has the gather
            gather = 0.0
    elif not setup.overlaps_data_parallel:
        reduce, gather = replica_times(setup, machine, parameters)
    is_twice = setup.tied_embeddings or setup.model.prediction_depth > 0  # the embedding
    if is_twice and any(setup.stages[stage].is_first != setup.stages[stage].is_last for stage in stages):
        apart = setup.pipeline_stride * (setup.pipeline_parallel - 1)
        size = setup.gradient_bytes * setup.embedding_parameters
        reduce += 2 * machine.message_time(0, apart, size, min(machine.devices_per_node, setup.pipeline_stride))
    # All ranks clear, scale and measure gradients; Adam moves parameters, two moments, gradients and a 16-bit copy.
    moved = 0.0
    for count, group in ((parameters.dense, setup.data_group), (parameters.routed, setup.expert_data_group)):
        share = group.size if setup.distributed_optimizer else 1
        moved += 4 * setup.gradient_bytes * count / (share if setup.shards_gradients else 1)
        moved += (24 + setup.gradient_bytes + BYTES) * count / share
    return StepEnd(reduce, machine.device.moving_time(moved, 20), gather)
