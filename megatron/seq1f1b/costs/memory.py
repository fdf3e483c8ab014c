"""How much memory a training step takes on a device. Bytes.

What layers keep is in layer_sizes; gradients and states follow Megatron's mixed precision with Adam.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..schedule import Action, Kind, Schedule
from ..schedule.costs import Table
from .kernels import BYTES
from .layer_sizes import (
    layer_activation,
    layer_keys_values,
    layer_keys_values_gradients,
    layer_state,
    layers_alike,
)
from .training_setup import TrainingSetup

GIB = 2**30
# The backward of a layer holds gradients beside activations: about as much as one and a half layers.
_WORKING_BYTES = 51
# A logit in 16 bit, in 32 bit, and its exponential; the last is kept for the backward.
_LOGIT_BYTES, _LOGIT_BYTES_KEPT = 12, 4
# What the allocator reserves, relative to the peak of what is allocated: with blocks of equal size, and of many (fitted
# on the memory that the authors of Seq1F1B, and others with their code, report).
_RESERVED_EQUAL, _RESERVED_UNEQUAL = 1.06, 1.27


@dataclass(frozen=True)
class Memory:
    """The memory of one rank at the moment of its peak, by use. Bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    keys_values: float
    states: float  # of recurrent layers
    logits: float
    working: float
    messages: float
    reserved: float  # unused, but not given back

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


def stage_kept(setup: TrainingSetup, stage: int, index: int) -> tuple[float, float, float]:
    """Activations, keys and values, and states that the forward of segment `index` leaves on a stage for its
    backward."""
    end = sum(setup.segments[: index + 1])
    span = end - setup.segments[index], end
    activations = keys_values = states = 0.0
    for layer, count in layers_alike(setup, stage):
        activations += count * layer_activation(setup, layer, *span)
        keys_values += count * layer_keys_values(setup, layer, *span)
        if end < setup.sequence_length:
            states += count * layer_state(setup, layer)
    return activations, keys_values, states


def activation_tables(setup: TrainingSetup) -> tuple[Table, Table]:
    """`activation` and `kept` of `Costs`, in bytes."""
    rows = []
    last = setup.placement.num_stages - 1
    for stage in range(setup.placement.num_stages):
        row = []
        for index, length in enumerate(setup.segments):
            held = sum(stage_kept(setup, stage, index))
            if stage == last:
                held += _LOGIT_BYTES_KEPT * _logits(setup, length)
            row.append(held)
        rows.append(tuple(row))
    table = tuple(rows)
    return table, table


def static_memory(setup: TrainingSetup, rank: int) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of a rank: what no schedule changes."""
    stages = setup.placement.stages_of(rank)
    parameters = sum(setup.stage_parameters(stage) for stage in stages)
    experts = sum(setup.stage_expert_parameters(stage) for stage in stages)
    share, expert_share = (
        group.size if setup.distributed_optimizer else 1 for group in (setup.data_group, setup.expert_data_group)
    )
    optimizer = 12 * (parameters / share + experts / expert_share)
    return BYTES * (parameters + experts), setup.software.gradient_bytes * (parameters + experts), optimizer


def rank_memory(setup: TrainingSetup, schedule: Schedule, rank: int) -> Memory:
    """The memory of a rank when its activations are at their peak."""
    placement = setup.placement
    stages = placement.stages_of(rank)
    at_peak, keys_values = _at_peak(setup, schedule.ranks[rank], stages)
    logits = activations = states = 0.0
    of_unit = {unit: stage_kept(setup, *unit) for unit in set(at_peak)}
    for stage, segment in at_peak:
        kept = of_unit[stage, segment]
        activations, keys_values, states = activations + kept[0], keys_values + kept[1], states + kept[2]
        if stage == placement.num_stages - 1:
            logits += _LOGIT_BYTES_KEPT * _logits(setup, setup.segments[segment])
    longest = max(setup.segments)
    rows = setup.micro_batch_size * longest / setup.context_parallel
    share = setup.model.hidden_size * rows
    parallel = setup.tensor_parallel if setup.sequence_parallel else 1
    working = _WORKING_BYTES * share
    if setup.recompute == "full":
        working += _layer_without_recomputation(setup, stages, longest)
    if placement.num_stages - 1 in stages:
        logits += (_LOGIT_BYTES - _LOGIT_BYTES_KEPT) * _logits(setup, longest)
    # What goes back between the segments of one micro-batch: the gradient of one state a layer.
    if len(setup.segments) > 1:
        states += max(
            sum(count * layer_state(setup, layer) for layer, count in layers_alike(setup, stage)) for stage in stages
        )
    messages = 4 * BYTES * share / parallel if setup.pipeline_parallel > 1 else 0.0

    weights, gradients, optimizer = static_memory(setup, rank)
    unequal = len(set(setup.segments)) > 1
    dynamic = activations + keys_values + states + logits + working + messages
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        keys_values=keys_values,
        states=states,
        logits=logits,
        working=working,
        messages=messages,
        reserved=((_RESERVED_UNEQUAL if unequal else _RESERVED_EQUAL) - 1) * dynamic,
    )


def _at_peak(
    setup: TrainingSetup, actions: Iterable[Action], stages: Iterable[int]
) -> tuple[list[tuple[int, int]], float]:
    """Of the moment at which a rank holds most between forwards and backwards: stage and segment of every unit in
    flight, and the bytes of the gradients of keys and values that later segments left."""
    activation, _ = activation_tables(setup)
    gradients = {
        stage: sum(count * layer_keys_values_gradients(setup, layer) for layer, count in layers_alike(setup, stage))
        for stage in stages
    }
    last = len(setup.segments) - 1
    held: dict[tuple[int, int, int], None] = {}
    units: list[tuple[int, int]] = []
    now = most = left = left_then = 0.0
    for kind, stage, microbatch, segment in actions:
        if kind is Kind.F:
            held[stage, microbatch, segment] = None
            now += activation[stage][segment]
        elif kind is not Kind.W and segment == last:
            left += gradients[stage]
        if now + left > most:
            most, left_then, units = now + left, left, [(stage, segment) for stage, _, segment in held]
        if kind in (Kind.B, Kind.W):
            del held[stage, microbatch, segment]
            now -= activation[stage][segment]
        if kind in (Kind.B, Kind.I) and segment == 0:
            left -= gradients[stage]
    return units, left_then


def _layer_without_recomputation(setup: TrainingSetup, stages: Iterable[int], length: int) -> float:
    """The activations of the layer that keeps most, for the last `length` tokens."""
    plain, span = replace(setup, recompute="none"), (setup.sequence_length - length, setup.sequence_length)
    layers = (layer for stage in stages for layer, _ in layers_alike(setup, stage))
    return max((layer_activation(plain, layer, *span) for layer in layers), default=0.0)


def _logits(setup: TrainingSetup, length: int) -> float:
    return setup.micro_batch_size * length / setup.context_parallel * setup.model.vocab_size / setup.tensor_parallel
