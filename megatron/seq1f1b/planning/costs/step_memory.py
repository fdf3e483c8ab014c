"""How much memory a training step takes on a device. Bytes.

layer_bytes has what layers keep; gradients and states follow Megatron's mixed precision with Adam.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from math import fsum, log2
from typing import NamedTuple

from ...schedule import COMPUTE_KINDS, MOVE_KINDS, Action, Kind, channels_of, partition_state
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
    layer_movable,
    layer_state,
    loss_bytes,
    loss_kept,
    positions_bytes,
    routed_bytes,
    whole_input,
)
from .training_setup import TrainingSetup

# What PyTorch's allocator holds beyond the peak of what is allocated: a share of what comes and goes; as large a share
# again for each doubling of the number of lengths of segments, since blocks of one length do not serve another; and a
# share of the logits, which need the largest blocks. Fitted to both counters of the allocator, without any prediction:
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


class Kept(NamedTuple):
    """What a unit leaves on a stage for its later actions. Bytes."""

    activations: float
    keys_values: float = 0.0
    states: float = 0.0
    logits: float = 0.0


def kept(setup: TrainingSetup, stage: int, after: Kind = Kind.F) -> tuple[Kept, ...]:
    """What a unit of each segment keeps on a stage after its forward, after I, or once it is OFFLOADed."""
    return _kept(setup, setup.alike[stage], after)


@lru_cache(maxsize=4096)
def _kept(setup: TrainingSetup, stage: int, after: Kind) -> tuple[Kept, ...]:
    if setup.parts:
        return tuple(chain(*(_kept(part, stage, after) for part in setup.parts)))
    is_last = stage == setup.placement.num_stages - 1
    found = []
    for length, span in zip(setup.segments, setup.spans, strict=True):
        logits = loss_kept(setup, length, after is Kind.I) if is_last else 0.0
        hidden = head_kept(setup, length, after is Kind.I) if is_last else 0.0
        if after is Kind.I:
            layers = setup.stage_layers[stage].items()
            of_layers = sum(count * layer_kept_for_weights(setup, layer, *span) for layer, count in layers)
            found.append(Kept(of_layers + hidden, logits=logits))
            continue
        sizes = (hidden, 0.0, 0.0)
        for layer, count in setup.stage_layers[stage].items():
            of_layer = _layer_kept(setup.alone, layer, *span)
            sizes = (sizes[0] + count * of_layer[0], sizes[1] + count * of_layer[1], sizes[2] + count * of_layer[2])
        found.append(Kept(*sizes, logits))
    if after is Kind.OFFLOAD:
        # The last segment takes the keys and values of all along.
        of_all = sum(each.keys_values for each in found)
        found = [Kept(0.0, each.keys_values, each.states) for each in found]
        found[-1] = found[-1]._replace(keys_values=found[-1].keys_values - of_all)
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _layer_kept(setup: TrainingSetup, layer: int, start: int, end: int) -> tuple[float, float, float]:
    """Activations, keys and values, and states after the forward of one layer."""
    activation = layer_activation(setup, layer, start, end)
    keys_values = layer_keys_values(setup, layer, start, end)
    if setup.offloads_modules:
        activation -= setup.offloads * layer_movable(setup, layer, start, end)
        keys_values *= 1 - setup.offloads
    return activation, keys_values, layer_state(setup, layer) if end < setup.sequence_length else 0.0


def _of_layers(setup: TrainingSetup, stage: int, of_layer: Callable[[int], float]) -> float:
    return sum(count * of_layer(layer) for layer, count in setup.stage_layers[stage].items())


@lru_cache(maxsize=1 << 14)
def moved_bytes(setup: TrainingSetup, stage: int, index: int) -> float:
    """What waits in the memory of the host while a unit is there; with Megatron's modules, what they move of it."""
    if setup.offloads_modules:
        span = setup.spans[index]
        return _of_layers(setup, stage, lambda layer: layer_moved(setup, layer, *span))
    here, away = kept(setup, stage)[index], kept(setup, stage, Kind.OFFLOAD)[index]
    return here.activations + (here.keys_values - away.keys_values) + here.logits


def layer_moved(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """What Megatron's modules move of one layer to the host."""
    if not setup.offloads_modules:
        return 0.0
    return setup.offloads * (layer_movable(setup, layer, start, end) + layer_keys_values(setup, layer, start, end))


def host_bytes(setup: TrainingSetup, actions: Iterable[Action]) -> float:
    """The most that a rank has in the memory of its host at once."""
    goes, comes = (Kind.F, Kind.B) if setup.offloads_modules else (Kind.OFFLOAD, Kind.RELOAD)
    now = most = 0.0
    for kind, stage, _, segment in actions:
        if kind in (goes, comes):
            size = moved_bytes(setup, stage, segment)
            now += size if kind is goes else -size
            most = max(most, now)
    return most


def activation_tables(setup: TrainingSetup) -> tuple[Table, Table]:
    """`activation` and `kept` of `Costs`, in bytes; a schedule may keep no more for W than it held before."""
    stages = range(setup.placement.num_stages)
    held, for_weights = (
        tuple(tuple(map(sum, kept(setup, stage, after))) for stage in stages) for after in (Kind.F, Kind.I)
    )
    return held, tuple(tuple(map(min, *rows)) for rows in zip(for_weights, held, strict=True))


def static_memory(setup: TrainingSetup, rank: int) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state that a rank has at all times; of a partitioned state these are shares."""
    parameters = [setup.parameters[stage] for stage in setup.placement.stages_of(rank)]
    whole, experts = sum(map(sum, parameters)), sum(each[1] for each in parameters)
    shares = whole
    if setup.distributed_optimizer:
        shares = (whole - experts) / setup.data_group.size + experts / setup.expert_data_group.size
    held = shares if _moves_state(setup) else whole
    return BYTES * held, setup.gradient_bytes * held, 12 * shares


def _moves_state(setup: TrainingSetup) -> bool:
    return setup.partitions_state and setup.data_group.size > 1


def _whole_chunks(setup: TrainingSetup, actions: Sequence[Action]) -> list[tuple[float, float]]:
    """By action, the weights and the gradients of chunks that are whole, beside the shares of a partitioned state.

    A chunk has gradients from its first backward until the next chunk ends, by when its reduction is over.
    """
    found = []
    parameters = [sum(each) for each in setup.parameters]
    last = {action.stage: action for action in actions}
    gathered, summed = set[int](), set[int]()
    ended = -1
    for action in partition_state(actions):
        kind, stage = action.kind, action.stage
        if kind is Kind.GATHER:
            gathered.add(stage)
        elif kind is Kind.RELEASE:
            gathered.remove(stage)
        else:
            if kind in (Kind.B, Kind.I, Kind.W):
                summed.add(stage)
            weights, gradients = (sum(parameters[each] for each in whole) for whole in (gathered, summed))
            found.append((BYTES * weights, setup.gradient_bytes * gradients))
            if action == last[stage]:
                summed.discard(ended)
                ended = stage
    return found


def rank_memory(setup: TrainingSetup, actions: Sequence[Action], rank: int) -> Memory:
    """The memory of a rank at the peak of its compute actions and moves to the host, in the order in which they run."""
    stages, actions = setup.placement.stages_of(rank), list(_when_freed(actions))
    waiting = beside = _messages_waiting(setup, actions, rank)
    whole = [(0.0, 0.0)] * len(actions)
    if _moves_state(setup):
        whole = _whole_chunks(setup, actions)
        beside = [messages + sum(chunks) for messages, chunks in zip(waiting, whole, strict=True)]
    number, gradients = _peak(setup, actions, stages, beside)
    kind, stage, _, segment = actions[number]
    loss, working = _running(setup, setup.alike[stage], kind)[segment]
    units = _in_flight(actions[: number + 1])
    sizes = [
        [count * size for size in kept(setup, stage, after)[segment]]
        for (stage, segment, after), count in Counter(units).items()
    ]
    activations, keys_values, states, logits = map(fsum, zip(*sizes, strict=True))
    activations += positions_bytes(setup, sum(setup.segments[segment] for segment in {unit[1] for unit in units}))
    # What goes back between the segments of one micro-batch: the gradient of one state a layer.
    if any(len(part.segments) > 1 for part in setup.parts or (setup,)):
        states += max(_of_layers(setup, stage, lambda layer: layer_state(setup, layer)) for stage in stages)
    longest = max(setup.segments)
    lengths = {setup.segments[unit[1]] for unit in units} if setup.parts else set(setup.segments)
    largest_loss = loss_bytes(setup, longest) if setup.placement.num_stages - 1 in stages else 0.0
    weights, of_weights, optimizer = static_memory(setup, rank)
    dynamic = activations + keys_values + gradients + states + logits + loss + working + waiting[number]
    return Memory(
        weights=weights + whole[number][0],
        gradients=of_weights + whole[number][1],
        optimizer=optimizer,
        activations=activations,
        keys_values=keys_values + gradients,
        states=states,
        logits=logits + loss,
        working=working,
        messages=waiting[number],
        reserved=(_HELD_BACK + _FOR_EACH_DOUBLING * log2(max(1, len(lengths)))) * dynamic + _OF_LOGITS * largest_loss,
    )


def _peak(
    setup: TrainingSetup, actions: Sequence[Action], stages: Sequence[int], beside: Sequence[float]
) -> tuple[int, float]:
    """The number of the action during which a rank holds most, and the gradients of keys and values that later segments
    left then. `beside` has what is held beside units and work, by action."""
    kinds = {action.kind for action in actions}.intersection(COMPUTE_KINDS)
    held = {stage: [*map(sum, kept(setup, stage))] for stage in stages}
    for_weights = {stage: [*map(sum, kept(setup, stage, Kind.I))] for stage in stages if Kind.I in kinds}
    gradients = {stage: _keys_values_gradients(setup, setup.alike[stage]) for stage in stages}
    running = {
        (kind, stage): [*map(sum, _running(setup, setup.alike[stage], kind))] for kind in kinds for stage in stages
    }
    now = left = most = left_at_most = 0.0
    at = 0
    for number, (kind, stage, _, segment) in enumerate(actions):
        if kind in MOVE_KINDS:
            size = moved_bytes(setup, stage, segment)
            now += size if kind is Kind.RELOAD else -size
            continue
        if kind is Kind.F:
            now += held[stage][segment]
        elif kind is not Kind.W:
            left += gradients[stage][0][segment]
        total = now + left + beside[number] + running[kind, stage][segment]
        if total > most:
            most, at, left_at_most = total, number, left
        if kind is Kind.I:
            now -= held[stage][segment] - for_weights[stage][segment]
        elif kind is not Kind.F:
            now -= (held if kind is Kind.B else for_weights)[stage][segment]
        if kind in (Kind.B, Kind.I):
            left += gradients[stage][1][segment]
    return at, left_at_most


@lru_cache(maxsize=4096)
def _keys_values_gradients(setup: TrainingSetup, stage: int) -> tuple[list[float], list[float]]:
    """By segment the gradients of keys and values that arise in its backward, and those that come and go when it ends.

    They arise in that of the last segment, the last of them in place of what attention's kernel held, and go with the
    first.
    """
    arising: list[float] = []
    later: list[float] = []
    for part in setup.parts or (setup,):
        in_all = _of_layers(part, stage, partial(layer_keys_values_gradients, part))
        in_place = max((layer_freed_by_attention(part, layer) for layer in part.stage_layers[stage]), default=0.0)
        none = [0.0] * (len(part.segments) - 1)
        arising += [*none, in_all - in_place]
        later += [*none, in_place]
        later[-len(part.segments)] -= in_all
    return arising, later


def _messages_waiting(setup: TrainingSetup, actions: Sequence[Action], rank: int) -> Sequence[float]:
    """By action, the bytes of messages that wait: for the next action, and for the rank at the other end.

    A receive is posted one action ahead. All units of a group pass through a chunk before the next one, so the last
    rank keeps outputs, and the first one gradients, until that is at work there. It comes to this rank one hop after
    another.
    """
    hops, chunk_of = setup.placement.num_ranks, setup.placement.chunk_of
    sizes = [whole_input(setup, length) / setup.token_shares for length in setup.segments]
    messages = channels_of(setup.placement, rank)
    changes = [0.0] * (len(actions) + 1)
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
    return [*accumulate(changes[:-1])]


def _in_flight(actions: Sequence[Action]) -> list[tuple[int, int, Kind]]:
    """The units in flight during the last of the actions: stage, segment, and after which action, F, I or OFFLOAD."""
    last = {action[1:]: Kind.F for action in actions if action.kind is Kind.F}
    for action in actions[:-1]:
        if action.kind in (Kind.B, Kind.W):
            del last[action[1:]]
        else:
            last[action[1:]] = Kind.F if action.kind is Kind.RELOAD else action.kind
    return [(stage, segment, kind) for (stage, _, segment), kind in last.items()]


def _when_freed(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions, each OFFLOAD where its memory is free: at the next one, or at its own RELOAD."""
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


@lru_cache(maxsize=4096)
def _running(setup: TrainingSetup, stage: int, kind: Kind) -> tuple[tuple[float, float], ...]:
    """What an action of this kind holds while it runs, beside what units keep, by segment: the loss, and all else."""
    if setup.parts:
        return tuple(chain(*(_running(part, stage, kind) for part in setup.parts)))
    has_loss = stage == setup.placement.num_stages - 1 and kind is not Kind.W
    found = []
    for length, span in zip(setup.segments, setup.spans, strict=True):
        loss = loss_bytes(setup, length, kind is Kind.F) if has_loss else 0.0
        # Tokens have come back from experts when the loss begins.
        routed = max(0.0, routed_bytes(setup, stage, length) - loss) if kind is Kind.F else 0.0
        if has_loss and keeps_logits(setup):  # these are counted with the unit
            loss -= loss_kept(setup, length)
        # Two layers are on their way, or at work.
        moving = 2 * max((layer_moved(setup, layer, *span) for layer in setup.stage_layers[stage]), default=0)
        if kind not in (Kind.B, Kind.I):
            found.append((loss, moving + whole_input(setup, length) + routed))
            continue
        working = moving + backward_working(setup, stage, *span)
        if has_loss:  # its backward ends before that of the layers begins
            working -= loss + sum(size(setup, length) for size in (loss_kept, head_kept))
            working += sum(size(setup, length, for_weights=True) for size in (loss_kept, head_kept) if kind is Kind.I)
        found.append((loss, max(0.0, working)))
    return tuple(found)
