"""The memory of a training step on a device, with Megatron's mixed precision and Adam. Bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from math import log2
from operator import sub

import numpy as np
from numpy.typing import NDArray

from ...schedule import COMPUTE_KINDS, Action, Kind, channels_of, partition_state
from ...schedule.cost_tables import Table
from .blocks import BYTES
from .layer_bytes import (
    backward_working,
    head_kept,
    keeps_logits,
    layer_activation,
    layer_freed_by_attention,
    layer_kept_for_weights,
    layer_keys_values,
    layer_keys_values_gradients,
    layer_moved,
    layer_state,
    loss_bytes,
    positions_bytes,
    routed_bytes,
    stage_moved,
)
from .training_setup import Stage, TrainingSetup

Sizes = NDArray[np.float64]

# What PyTorch's allocator reserves beyond the peak of what is allocated: a share of what comes and goes, a share of it
# for each doubling of the number of lengths of segments, a share of the logits (fitted by tools/paper/allocator.py).
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


# The actions after which a unit keeps what it has before, and after, an action of each kind; None: it keeps nothing.
_BEFORE = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I, Kind.OFFLOAD: Kind.F, Kind.RELOAD: Kind.OFFLOAD}
_AFTER = {Kind.F: Kind.F, Kind.I: Kind.I, Kind.OFFLOAD: Kind.OFFLOAD, Kind.RELOAD: Kind.F}


@lru_cache(maxsize=4096)
def kept(setup: TrainingSetup, stage: Stage, after: Kind = Kind.F) -> Sizes:
    """What a unit of each segment keeps on a stage after F, I or OFFLOAD: activations, keys and values, states, and
    logits. [segments, 4]."""
    if setup.parts:
        return np.concatenate([kept(part, stage, after) for part in setup.parts])
    if after is Kind.OFFLOAD:
        stays = kept(setup, stage) * (0, 1, 1, 0)
        stays[-1, 1] -= stays[:, 1].sum()  # the last segment takes the keys and values of all along
        return stays
    found = []
    for length, span in zip(setup.segments, setup.spans, strict=True):
        sizes = [0.0] * 4
        if stage.is_last:
            sizes[0], sizes[3] = head_kept(setup, length, after is Kind.I)
        for layer, count in stage.layers:
            for use, size in enumerate(_layer_kept(setup.alone, layer, *span, after)):
                sizes[use] += count * size
        found.append(sizes)
    return np.array(found)


@lru_cache(maxsize=1 << 16)
def _layer_kept(setup: TrainingSetup, layer: int, start: int, end: int, after: Kind) -> tuple[float, ...]:
    """Activations, keys and values, and states of one layer."""
    if after is Kind.I:
        return (layer_kept_for_weights(setup, layer, start, end),)
    sizes = layer_activation(setup, layer, start, end), layer_keys_values(setup, layer, start, end)
    state = layer_state(setup, layer) if end < setup.sequence_length else 0.0
    return *map(sub, sizes, layer_moved(setup, layer, start, end)), state


@lru_cache(maxsize=1024)
def moved_bytes(setup: TrainingSetup) -> Table:
    """What a unit has in the memory of the host while it is there, or what Megatron's modules move of it, by stage and
    segment."""

    def of_stage(stage: Stage) -> tuple[float, ...]:
        if setup.offloads_modules:
            return tuple(stage_moved(setup, stage, *span) for span in setup.spans)
        return tuple((kept(setup, stage) - kept(setup, stage, Kind.OFFLOAD)).sum(axis=1).tolist())

    rows = {stage: of_stage(stage) for stage in set(setup.stages)}
    return tuple(rows[stage] for stage in setup.stages)


def host_bytes(setup: TrainingSetup, actions: Iterable[Action]) -> float:
    """The most that a rank has in the memory of its host at once."""
    goes, comes = (Kind.F, Kind.B) if setup.offloads_modules else (Kind.OFFLOAD, Kind.RELOAD)
    moves = [action for action in actions if action.kind in (goes, comes)]
    sizes = moved_bytes(setup) if moves else ()
    changes = (sizes[stage][segment] * (1 if kind is goes else -1) for kind, stage, _, segment in moves)
    return max(accumulate(changes, initial=0.0))


def activation_tables(setup: TrainingSetup) -> tuple[Table, Table]:
    """`activation` and `kept` of `Costs`; a schedule may keep no more for W than it held before."""
    held, for_weights = (
        tuple(tuple(kept(setup, stage, after).sum(axis=1).tolist()) for stage in setup.stages)
        for after in (Kind.F, Kind.I)
    )
    return held, tuple(tuple(map(min, *rows)) for rows in zip(for_weights, held, strict=True))


def static_memory(setup: TrainingSetup, rank: int) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of a rank at all times; those of a partitioned state are shares."""
    parameters = [setup.parameters[stage] for stage in setup.placement.stages_of(rank)]
    whole, experts = sum(map(sum, parameters)), sum(each[1] for each in parameters)
    shares = whole
    if setup.distributed_optimizer:
        shares = (whole - experts) / setup.data_group.size + experts / setup.expert_data_group.size
    held = shares if _moves_state(setup) else whole
    return BYTES * held, setup.gradient_bytes * held, 12 * shares


def _moves_state(setup: TrainingSetup) -> bool:
    return setup.partitions_state and setup.data_group.size > 1


def _whole_chunks(setup: TrainingSetup, actions: Sequence[Action]) -> Sizes:
    """The weights and the gradients of whole chunks at each action, beside the shares of a partitioned state. A chunk
    has gradients from its first backward until the next chunk ends, because its reduction is over by then."""
    if not _moves_state(setup):
        return np.zeros((len(actions), 2))
    parameters, last = [sum(each) for each in setup.parameters], {action.stage: action for action in actions}
    gathered, summed, ended = set[int](), set[int](), -1
    found = []
    for action in partition_state(actions):
        kind, stage = action.kind, action.stage
        if kind is Kind.GATHER:
            gathered.add(stage)
        elif kind is Kind.RELEASE:
            gathered.remove(stage)
        else:
            if kind in (Kind.B, Kind.I, Kind.W):
                summed.add(stage)
            found.append([sum(parameters[each] for each in whole) for whole in (gathered, summed)])
            if action == last[stage]:
                summed.discard(ended)
                ended = stage
    return np.array(found) * (BYTES, setup.gradient_bytes)


def rank_memory(setup: TrainingSetup, actions: Sequence[Action], rank: int) -> Memory:
    """The memory of a rank at its peak; `actions` are its compute actions and moves to the host, in order."""
    stages, order = [setup.stages[stage] for stage in setup.placement.stages_of(rank)], list(_when_freed(actions))
    changes = {key: _changes(setup, setup.stages[key[1]], key[0]) for key in {action[:2] for action in order}}
    of_actions = np.array([changes[kind, stage][segment] for kind, stage, _, segment in order])
    first, during, last = of_actions.transpose(1, 0, 2)
    first[1:] += last[:-1]
    held = np.zeros((len(order), len(fields(Memory))))  # in the order of these fields
    held[:, :2] = _whole_chunks(setup, order)
    held[:, 3:8] = first.cumsum(axis=0) + during
    held[:, 8] = _messages_waiting(setup, order, rank)
    totals = held.sum(axis=1)
    computing = (number for number, action in enumerate(order) if action.kind in COMPUTE_KINDS)
    peak = max(computing, key=totals.__getitem__)
    most = held[peak]
    most[:3] += static_memory(setup, rank)
    ended = {action[1:] for action in order[:peak] if action.kind in (Kind.B, Kind.W)}
    segments = {action.segment for action in order[: peak + 1] if action.kind is Kind.F and action[1:] not in ended}
    most[3] += positions_bytes(setup, sum(setup.segments[segment] for segment in segments))
    # The gradient of one state of each layer goes back between the segments of a micro-batch.
    if any(len(part.segments) > 1 for part in setup.parts or (setup,)):
        most[5] += max(sum(count * layer_state(setup, layer) for layer, count in stage.layers) for stage in stages)
    lengths = {setup.segments[segment] for segment in segments} if setup.parts else set(setup.segments)
    most[9] = (_HELD_BACK + _FOR_EACH_DOUBLING * log2(max(1, len(lengths)))) * most[3:9].sum()
    if stages[-1].is_last:
        most[9] += _OF_LOGITS * loss_bytes(setup, max(setup.segments))
    return Memory(*most.tolist())


@lru_cache(maxsize=4096)
def _changes(setup: TrainingSetup, stage: Stage, kind: Kind) -> Sizes:
    """What an action adds when it starts, holds while it runs, and adds when it ends: activations, keys and values with
    their gradients, states, logits, and all else. [segments, 3, 5]."""
    if setup.parts:
        return np.concatenate([_changes(part, stage, kind) for part in setup.parts])
    found = np.zeros((len(setup.segments), 3, 5))
    first, during, last = found.transpose(1, 0, 2)
    before, after = (kept(setup, stage, left[kind]) if kind in left else 0.0 for left in (_BEFORE, _AFTER))
    (first if kind is Kind.F else last)[:, :4] += after - before
    if kind in COMPUTE_KINDS:
        during[:, 3:] = [_running(setup, stage, kind, *span) for span in setup.spans]
    if kind in (Kind.B, Kind.I):
        # Gradients of the keys and values of earlier segments arise in the backward of the last segment, partly in
        # place of what attention's kernel held, and go with the first.
        in_all = sum(count * layer_keys_values_gradients(setup, layer) for layer, count in stage.layers)
        in_place = max((layer_freed_by_attention(setup, layer) for layer, _ in stage.layers), default=0.0)
        first[-1, 1] += in_all - in_place
        last[-1, 1] += in_place
        last[0, 1] -= in_all
    return found


def _running(setup: TrainingSetup, stage: Stage, kind: Kind, start: int, end: int) -> tuple[float, float]:
    """What an action of this kind holds while it runs, beside what units keep: the loss, and all else."""
    length, has_loss = end - start, stage.is_last and kind is not Kind.W
    loss = loss_bytes(setup, length, kind is Kind.F) if has_loss else 0.0
    # Tokens have come back from experts when the loss begins.
    blocks = (block for layer, _ in stage.layers for block in setup.blocks(layer))
    routed = max(0.0, routed_bytes(setup, blocks, length) - loss) if kind is Kind.F else 0.0
    hidden, of_loss = head_kept(setup, length)
    if has_loss and keeps_logits(setup):  # these are counted with the unit
        loss -= of_loss
    # Two layers are on their way, or at work.
    moving = 2 * max((sum(layer_moved(setup, layer, start, end)) for layer, _ in stage.layers), default=0.0)
    if kind not in (Kind.B, Kind.I):
        return loss, moving + setup.whole_input(length) + routed
    working = moving + backward_working(setup, stage, start, end)
    if has_loss:  # its backward ends before that of the layers begins
        working -= loss + of_loss + hidden
        if kind is Kind.I:
            working += sum(head_kept(setup, length, for_weights=True))
    return loss, max(0.0, working)


def _messages_waiting(setup: TrainingSetup, actions: Sequence[Action], rank: int) -> Sizes:
    """The bytes of messages that wait at each action: received for the next one, since receives are posted one action
    ahead, and not yet taken by the other end. The last rank keeps outputs, and the first one gradients, until all units
    of a group have passed a chunk and the next chunk is at work there, one hop after another."""
    hops, chunk_of = setup.placement.num_ranks, setup.placement.chunk_of
    sizes = [setup.residual(length) for length in setup.segments]
    messages = channels_of(setup.placement, rank)
    changes = np.zeros(len(actions) + 1)
    numbers = [number for number, action in enumerate(actions) if action.kind in COMPUTE_KINDS]
    for number, following in pairwise(numbers):
        kind, stage, _, segment = actions[following]
        if kind is not Kind.W and (Kind.RECV_F if kind is Kind.F else Kind.RECV_B, stage) in messages:
            changes[number] += sizes[segment]
            changes[number + 1] -= sizes[segment]
    for kinds, send, step in (((Kind.F,), Kind.SEND_F, 1), ((Kind.B, Kind.I), Kind.SEND_B, -1)):
        leaving = {stage for sent, stage in messages if sent is send and chunk_of(stage) != chunk_of(stage + step)}
        if not leaving:
            continue
        places = {actions[number][1:]: place for place, number in enumerate(numbers) if actions[number].kind in kinds}
        for (stage, microbatch, segment), place in places.items():
            taken = places.get((stage + step * hops, microbatch, segment), len(numbers)) - hops
            if stage in leaving and taken > place:
                changes[numbers[place] + 1] += sizes[segment]
                changes[numbers[taken] + 1] -= sizes[segment]
    return changes[:-1].cumsum()


def _when_freed(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions, each OFFLOAD where it has freed its memory: at the next one, or at its own RELOAD."""
    leaving = back = None
    for action in actions:
        is_offload = action.kind is Kind.OFFLOAD
        if leaving is not None and (is_offload or action == back):
            yield leaving
            leaving = None
        if is_offload:
            leaving, back = action, action._replace(kind=Kind.RELOAD)
        else:
            yield action
