"""The memory of a training step on a device, with Megatron's mixed precision and Adam. Bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from math import log2

import numpy as np

from ...schedule import COMPUTE_KINDS, Action, Kind, channels_of, partition_state
from .blocks import BYTES
from .layer_bytes import Sizes, changes_of, layer_state, loss_bytes, moved_bytes
from .training_setup import TrainingSetup

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


def host_bytes(setup: TrainingSetup, actions: Iterable[Action]) -> float:
    """The most that a rank has in the memory of its host at once."""
    goes, comes = (Kind.F, Kind.B) if setup.offloads_modules else (Kind.OFFLOAD, Kind.RELOAD)
    moves = [action for action in actions if action.kind in (goes, comes)]
    sizes = moved_bytes(setup) if moves else ()
    changes = (sizes[stage][segment] * (1 if kind is goes else -1) for kind, stage, _, segment in moves)
    return max(accumulate(changes, initial=0.0))


def static_memory(setup: TrainingSetup, rank: int) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of a rank at all times; those of a partitioned state are shares."""
    parameters = [setup.parameters[stage] for stage in setup.placement.stages_of(rank)]
    whole, experts = sum(map(sum, parameters)), sum(each[1] for each in parameters)
    shares = whole
    if setup.distributed_optimizer:
        shares = (whole - experts) / setup.data_group.size + experts / setup.expert_data_group.size
    held = shares if setup.moves_state else whole
    return BYTES * held, setup.gradient_bytes * held, 12 * shares


def _whole_chunks(setup: TrainingSetup, actions: Sequence[Action]) -> Sizes:
    """The weights and the gradients of whole chunks at each action, beside the shares of a partitioned state. A chunk
    has gradients from its first backward until the next chunk ends, because its reduction is over by then."""
    if not setup.moves_state:
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
    changes = {key: changes_of(setup, setup.stages[key[1]], key[0]) for key in {action[:2] for action in order}}
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
    if not setup.model.learned_positions:  # rotary angles in 32 bit, which all layers and micro-batches share
        size = setup.model.latent.rotary_head_dim if setup.model.latent else setup.model.head_dim
        most[3] += 4 * sum(setup.segments[segment] for segment in segments) / setup.context_parallel * size
    # The gradient of one state of each layer goes back between the segments of a micro-batch.
    if any(len(part.segments) > 1 for part in setup.parts or (setup,)):
        most[5] += max(sum(count * layer_state(setup, layer) for layer, count in stage.layers) for stage in stages)
    lengths = {setup.segments[segment] for segment in segments} if setup.parts else set(setup.segments)
    most[9] = (_HELD_BACK + _FOR_EACH_DOUBLING * log2(max(1, len(lengths)))) * most[3:9].sum()
    if stages[-1].is_last:
        most[9] += _OF_LOGITS * loss_bytes(setup, max(setup.segments))
    return Memory(*most.tolist())


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
