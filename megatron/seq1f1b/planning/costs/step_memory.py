"""How much memory a training step takes on a device. Bytes.

What layers keep is in layer_bytes; gradients and states follow Megatron's mixed precision with Adam.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import log2
from typing import Any, NamedTuple

from ...schedule import COMPUTE_KINDS, MOVE_KINDS, Action, Kind
from ...schedule.cost_tables import Table
from .blocks import BYTES
from .layer_bytes import (
    backward_working,
    keeps_logits,
    layer_activation,
    layer_kept_for_weights,
    layer_keys_values,
    layer_keys_values_gradients,
    layer_movable,
    layer_state,
    loss_bytes,
    loss_kept,
    positions_bytes,
    whole_input,
)
from .training_setup import TrainingSetup

# What PyTorch's allocator holds beyond the peak of what is allocated: a share of what comes and goes, and more of it
# whenever the number of lengths of segments doubles, since blocks of one length do not serve another; and a share of
# the logits, which need the largest blocks. Measured by both counters of the allocator, without any prediction:
# tools/paper/allocator.py.
_HELD_BACK, _FOR_EACH_DOUBLING, _OF_LOGITS = 0.02, 0.071, 0.38


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
    kept, span = (0.0, 0.0, 0.0), setup.spans[index]
    for layer, count in setup.stage_layers(stage).items():
        sizes = _layer_kept(setup.alone, layer, *span)
        kept = (kept[0] + count * sizes[0], kept[1] + count * sizes[1], kept[2] + count * sizes[2])
    return kept


@lru_cache(maxsize=1 << 16)
def _layer_kept(setup: TrainingSetup, layer: int, start: int, end: int) -> tuple[float, float, float]:
    activation = layer_activation(setup, layer, start, end)
    keys_values = layer_keys_values(setup, layer, start, end)
    if setup.offloads_modules:
        activation -= setup.offloads * layer_movable(setup, layer, start, end)
        keys_values *= 1 - setup.offloads
    return activation, keys_values, layer_state(setup, layer) if end < setup.sequence_length else 0.0


def moved_bytes(setup: TrainingSetup, stage: int, index: int) -> float:
    """What waits in the memory of the host of a unit that moves: its activations, kept logits too, and the keys and
    values of whole sequences, which no cache holds. What of a unit moves by Megatron's modules is what it has not kept.
    """
    if setup.offloads_modules:
        span = setup.spans[index]
        return _of_layers(setup, stage, lambda layer: layer_moved(setup, layer, *span))
    activations, keys_values, _ = stage_kept(setup, stage, index)
    return activations + (keys_values if len(setup.segments) == 1 else 0.0) + _loss_kept(setup, stage, index)


def layer_moved(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """What Megatron's modules move of one layer to the host."""
    if not setup.offloads_modules:
        return 0.0
    whole = layer_movable(setup, layer, start, end) + layer_keys_values(setup, layer, start, end)
    return setup.offloads * whole


def host_bytes(setup: TrainingSetup, actions: Iterable[Action]) -> float:
    """The most that a rank has in the memory of its host at once."""
    goes, comes = (Kind.F, Kind.B) if setup.offloads_modules else (Kind.OFFLOAD, Kind.RELOAD)
    now = most = 0.0
    for kind, stage, _, segment in actions:
        if kind in (goes, comes):
            size = _by_segment(setup, stage, moved_bytes)[segment]
            now += size if kind is goes else -size
            most = max(most, now)
    return most


def stage_kept_for_weights(setup: TrainingSetup, stage: int, index: int) -> float:
    """What the input gradients of segment `index` leave in the layers of a stage for its weight gradients."""
    span = setup.spans[index]
    return _of_layers(setup, stage, lambda layer: layer_kept_for_weights(setup, layer, *span))


def _of_layers(setup: TrainingSetup, stage: int, of_layer: Callable[[int], float]) -> float:
    return sum(count * of_layer(layer) for layer, count in setup.stage_layers(stage).items())


def activation_tables(setup: TrainingSetup) -> tuple[Table, Table]:
    """`activation` and `kept` of `Costs`, in bytes; of these, schedules take no more to be kept than was held."""
    stages = range(setup.placement.num_stages)
    held = tuple(_by_segment(setup, stage, held_bytes) for stage in stages)
    kept = tuple(_by_segment(setup, stage, _kept_for_weights) for stage in stages)
    return held, tuple(tuple(map(min, *rows)) for rows in zip(kept, held, strict=True))


def _by_segment[Size](
    setup: TrainingSetup, stage: int, of_segment: Callable[[TrainingSetup, int, int], Size]
) -> tuple[Size, ...]:
    return _of_first_alike(setup, setup.alike[stage], of_segment)


@lru_cache(maxsize=4096)
def _of_first_alike(
    setup: TrainingSetup, stage: int, of_segment: Callable[[TrainingSetup, int, int], Any]
) -> tuple[Any, ...]:
    return tuple(of_segment(setup, stage, index) for index in range(len(setup.segments)))


def held_bytes(setup: TrainingSetup, stage: int, index: int) -> float:
    return sum(stage_kept(setup, stage, index)) + _loss_kept(setup, stage, index)


def _kept_for_weights(setup: TrainingSetup, stage: int, index: int) -> float:
    return stage_kept_for_weights(setup, stage, index) + _loss_kept(setup, stage, index, for_weights=True)


def _loss_kept(setup: TrainingSetup, stage: int, index: int, for_weights: bool = False) -> float:
    is_last = stage == setup.placement.num_stages - 1
    return loss_kept(setup, setup.segments[index], for_weights) if is_last else 0.0


def static_memory(setup: TrainingSetup, rank: int, actions: Sequence[Action] = ()) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of a rank; with a partitioned state the whole gradients are those of its
    `actions`, of one chunk at least."""
    stages = setup.placement.stages_of(rank)
    parameters = {stage: sum(setup.parameters[stage]) for stage in stages}
    whole, experts = sum(parameters.values()), sum(setup.parameters[stage][1] for stage in stages)
    shares = whole
    if setup.distributed_optimizer:
        shares = (whole - experts) / setup.data_group.size + experts / setup.expert_data_group.size
    if not setup.partitions_state or setup.data_group.size == 1:
        return BYTES * whole, setup.gradient_bytes * whole, 12 * shares
    weights = shares + sum(sorted(parameters.values())[-2:])
    gradients = shares + max(_most_at_once(parameters, actions), max(parameters.values()))
    return BYTES * weights, setup.gradient_bytes * gradients, 12 * shares


def _most_at_once(parameters: Mapping[int, float], actions: Sequence[Action]) -> float:
    """Parameters of the stages that have whole gradients at once: each from its first backward until the stage that is
    next to end has ended, when its reduction is over at the latest."""
    last = {action.stage: index for index, action in enumerate(actions)}
    now: dict[int, float] = {}
    most, ended = 0.0, -1
    for index, action in enumerate(actions):
        if action.kind is not Kind.F and action.stage not in now:
            now[action.stage] = parameters[action.stage]
            most = max(most, sum(now.values()))
        if index == last[action.stage]:
            if ended >= 0:
                now[ended] = 0.0
            ended = action.stage
    return most


def rank_memory(setup: TrainingSetup, actions: Sequence[Action], rank: int) -> Memory:
    """The memory of a rank at the peak of its compute actions, in the order in which they run, with its moves to the
    memory of the host."""
    stages = setup.placement.stages_of(rank)
    peak = _peak(setup, list(_when_freed(actions)), stages)
    activations = keys_values = states = logits = 0.0
    left = {stage: _by_segment(setup, stage, stage_kept) for stage in stages}
    for (stage, segment, last), count in Counter(peak.units).items():
        if last is Kind.I:
            activations += count * _by_segment(setup, stage, stage_kept_for_weights)[segment]
        else:
            kept = left[stage][segment]
            activations += count * kept[0] * (last is not Kind.OFFLOAD)
            keys_values += count * kept[1] * (last is not Kind.OFFLOAD or len(setup.segments) > 1)
            states += count * kept[2]
        if stage == setup.placement.num_stages - 1 and last is not Kind.OFFLOAD:
            logits += count * _loss_kept(setup, stage, segment, last is Kind.I)
    activations += positions_bytes(setup, sum(setup.segments[unit[1]] for unit in peak.units if unit[0] == stages[0]))
    # What goes back between the segments of one micro-batch: the gradient of one state a layer.
    if len(setup.segments) > 1:
        states += max(_of_layers(setup, stage, lambda layer: layer_state(setup, layer)) for stage in stages)
    longest = max(setup.segments)
    messages = 4 * whole_input(setup, longest) / setup.token_shares if setup.pipeline_parallel > 1 else 0.0

    largest_loss = loss_bytes(setup, longest) if setup.placement.num_stages - 1 in stages else 0.0
    weights, gradients, optimizer = static_memory(setup, rank, actions)
    dynamic = activations + keys_values + peak.gradients + states + logits + peak.loss + peak.working + messages
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        keys_values=keys_values + peak.gradients,
        states=states,
        logits=logits + peak.loss,
        working=peak.working,
        messages=messages,
        reserved=(_HELD_BACK + _FOR_EACH_DOUBLING * log2(len(set(setup.segments)))) * dynamic
        + _OF_LOGITS * largest_loss,
    )


class _Running(NamedTuple):
    """What an action holds beside what forwards leave: the loss, and all else."""

    loss: float
    working: float


@dataclass(frozen=True)
class _Peak:
    """`units` are stage and segment of every unit in flight, and its last action: an I where only weight gradients are
    to come, an OFFLOAD where it is in the memory of the host. `gradients` are those that later segments left for keys
    and values; `loss` and `working` what the action holds. Bytes.
    """

    units: tuple[tuple[int, int, Kind], ...]
    gradients: float
    loss: float
    working: float


def _peak(setup: TrainingSetup, actions: Sequence[Action], stages: Iterable[int]) -> _Peak:
    """Of the action during which a rank holds most."""
    kinds = {action.kind for action in actions}.intersection(COMPUTE_KINDS)
    activation = {stage: _by_segment(setup, stage, held_bytes) for stage in stages}
    kept = {stage: _by_segment(setup, stage, _kept_for_weights) for stage in stages if Kind.I in kinds}
    gradients = {
        stage: _of_layers(setup, stage, lambda layer: layer_keys_values_gradients(setup, layer)) for stage in stages
    }
    running = {(kind, stage): _by_segment(setup, stage, _RUNNING[kind]) for kind in kinds for stage in stages}
    moved = {stage: _by_segment(setup, stage, moved_bytes) for stage in stages}
    last = len(setup.segments) - 1
    now = left = most = left_then = 0.0
    at = -1
    for number, (kind, stage, _, segment) in enumerate(actions):
        if kind in MOVE_KINDS:
            size = moved[stage][segment]
            now += size if kind is Kind.RELOAD else -size
            continue
        if kind is Kind.F:
            now += activation[stage][segment]
        elif kind is not Kind.W and segment == last:
            left += gradients[stage]
        loss, working = running[kind, stage][segment]
        total = now + left + loss + working
        if total > most:
            most, left_then, at = total, left, number
        if kind is Kind.I:
            now -= activation[stage][segment] - kept[stage][segment]
        elif kind is not Kind.F:
            now -= (activation if kind is Kind.B else kept)[stage][segment]
        if kind in (Kind.B, Kind.I) and segment == 0:
            left -= gradients[stage]
    if at < 0:
        return _Peak((), 0.0, 0.0, 0.0)
    kind, stage, _, segment = actions[at]
    return _Peak(_in_flight(actions[: at + 1]), left_then, *running[kind, stage][segment])


def _in_flight(actions: Sequence[Action]) -> tuple[tuple[int, int, Kind], ...]:
    """Stage and segment of the units in flight during the last of the actions, and the last action of each."""
    last = {action[1:]: Kind.F for action in actions if action.kind is Kind.F}
    for action in actions[:-1]:
        if action.kind in (Kind.B, Kind.W):
            del last[action[1:]]
        else:
            last[action[1:]] = action.kind
    return tuple((stage, segment, kind) for (stage, _, segment), kind in last.items())


def _when_freed(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions, each OFFLOAD where its memory is free: at the next one, or at its own RELOAD."""
    leaving = None
    for action in actions:
        is_offload = action.kind is Kind.OFFLOAD
        if leaving is not None and (is_offload or action == leaving._replace(kind=Kind.RELOAD)):
            yield leaving
            leaving = None
        if is_offload:
            leaving = action
        else:
            yield action


def _running(kind: Kind, setup: TrainingSetup, stage: int, index: int) -> _Running:
    length, loss = setup.segments[index], 0.0
    if stage == setup.placement.num_stages - 1 and kind is not Kind.W:
        loss = loss_bytes(setup, length, kind is Kind.F)
        if keeps_logits(setup):  # these are counted with the unit
            loss -= loss_kept(setup, length)
    # Two layers are on their way, or at work.
    moving = 2 * max((layer_moved(setup, layer, *setup.spans[index]) for layer in setup.stage_layers(stage)), default=0)
    if kind not in (Kind.B, Kind.I):
        return _Running(loss, moving + whole_input(setup, length))
    working = moving + backward_working(setup, stage, *setup.spans[index])
    # The backward of pieces ends before that of the layers begins.
    return _Running(loss, working if keeps_logits(setup) else max(0.0, working - loss))


_RUNNING = {kind: partial(_running, kind) for kind in COMPUTE_KINDS}
