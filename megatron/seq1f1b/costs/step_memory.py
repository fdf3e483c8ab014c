"""The memory of a training step on a device, with Megatron's mixed precision and Adam. Bytes."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from math import log2
from typing import NamedTuple

import numpy as np

from ..schedule import COMPUTE_KINDS, Action, Kind, Placement, Unit, channels_of, partition_state
from ..schedule.schedule import places
from .blocks import BYTES
from .layer_bytes import Phase, Sizes, Use, changes_of, layer_state, loss_bytes, moved_bytes
from .training_setup import TrainingSetup
from .units_by_layer import UnitsByLayer

# What PyTorch's allocator reserves beyond the peak of what is allocated: a share of what comes and goes, a share of it
# for each doubling of the number of lengths of segments, a share of the logits (fitted by tools/paper/allocator.py).
HELD_BACK = 0.02
_FOR_EACH_DOUBLING = 0.071
HELD_BACK_OF_LOGITS = 0.38
# Of a parameter: its copy in 32 bit and the two moments of Adam.
_OPTIMIZER_BYTES = 12


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


# The columns of arrays that hold all uses.
_COLUMN = {field.name: number for number, field in enumerate(fields(Memory))}
# What comes and goes in a step, so that the allocator holds back a part of it.
_COME_AND_GO = ("activations", "keys_values", "states", "logits", "working", "messages")


def host_bytes(setup: TrainingSetup, actions: Sequence[Action], paired: Set[Action] = frozenset()) -> float:
    """The most bytes that a rank has in the memory of its host at once. The forwards in `paired` run beside the next
    action, layer by layer, so that parts of one unit leave while parts of the other come back."""
    # Megatron moves a part of every unit, from its forward to its backward.
    signs = {Kind.F: 1, Kind.B: -1} if setup.moves_parts else {Kind.OFFLOAD: 1, Kind.RELOAD: -1}
    # The backward of a pair first, since its unit comes back while that of the forward leaves.
    moves = [action for place in places(actions, paired) for action in reversed(place) if action.kind in signs]
    sizes = moved_bytes(setup) if moves else ()
    changes: list[float] = []
    if setup.moves_by_layer:
        away = {action.unit for action in moves}
        for action in actions:
            if action.unit in away:
                changes.append(_share_by_layer(setup, action) * sizes[action.stage][action.segment])
    else:
        for kind, stage, _, segment in moves:
            changes.append(signs[kind] * sizes[stage][segment])
    return max(accumulate(changes, initial=0.0))


def _share_by_layer(setup: TrainingSetup, action: Action) -> float:
    """What an action adds to the host, as a part of its unit, if units move layer by layer: all layers have left when
    the forward ends, one is back when the backward begins, and all are when it ends."""
    layer = 1 / max(1, setup.layers_per_stage[action.stage])
    if action.kind is Kind.F:
        return 1.0
    if action.kind is Kind.RELOAD:
        return -layer
    return layer - 1 if action.kind.facts.gives_input_gradient else 0.0


class StaticMemory(NamedTuple):
    """Bytes of the state of a model that a rank holds at all times."""

    weights: float
    gradients: float
    optimizer: float


def static_memory(setup: TrainingSetup, rank: int) -> StaticMemory:
    """The weights, gradients and optimizer state of a rank; those of a partitioned state are shares."""
    stages = setup.placement.stages_of(rank)
    parameters = [setup.parameters[stage] for stage in stages]
    whole = sum(of_stage.dense + of_stage.routed for of_stage in parameters)
    experts = sum(of_stage.routed for of_stage in parameters)
    shares = whole
    if setup.distributed_optimizer:
        shares = (whole - experts) / setup.data_group.size + experts / setup.expert_data_group.size
    optimizer = _OPTIMIZER_BYTES * shares
    if setup.shards_gradients:
        # Two layers are whole, one at work and one on its way, and so are embeddings, which belong to no layer.
        layers_of_stages = [setup.stages[stage] for stage in stages]
        layers = (layer for of_stage in layers_of_stages for layer, _ in of_stage.layers)
        two_layers = 2 * max(map(sum, map(setup.layer_parameters, layers)), default=0.0)
        num_embeddings = sum(of_stage.is_first + of_stage.is_last for of_stage in layers_of_stages)
        held = shares + two_layers + num_embeddings * setup.embedding_parameters
        weights = held if setup.shards_parameters else whole
        return StaticMemory(BYTES * weights, setup.gradient_bytes * held, optimizer)
    held = shares if setup.moves_state else whole
    return StaticMemory(BYTES * held, setup.gradient_bytes * held, optimizer)


def _whole_chunks(setup: TrainingSetup, actions: Sequence[Action]) -> Sizes:
    """The weights and the gradients of whole chunks at each action, beside the shares of a partitioned state. A chunk
    has gradients from its first backward until the next chunk ends, because its reduction is over by then.
    [actions, 2]."""
    if not setup.moves_state:
        return np.zeros((len(actions), 2))
    parameters = [sum(of_stage) for of_stage in setup.parameters]
    last = {action.stage: action for action in actions}
    gathered = set[int]()  # stages with whole weights
    summed = set[int]()  # stages with whole gradients
    ended = -1
    numbers = []
    for action in partition_state(actions):
        kind = action.kind
        stage = action.stage
        if kind is Kind.GATHER:
            gathered.add(stage)
        elif kind is Kind.RELEASE:
            gathered.remove(stage)
        else:
            if kind.facts.gives_input_gradient or kind.facts.gives_weight_gradient:
                summed.add(stage)
            numbers.append([sum(parameters[stage] for stage in whole) for whole in (gathered, summed)])
            if action == last[stage]:
                summed.discard(ended)
                ended = stage
    return np.array(numbers) * (BYTES, setup.gradient_bytes)


class RankOrder:
    """The actions of a rank, each OFFLOAD where it has freed its memory, and where in this order what changes: all that
    set-ups with the same order share. `changes` are pairs of a kind and a stage."""

    def __init__(
        self,
        placement: Placement,
        rank: int,
        actions: Iterable[Action],
        paired: Set[Action] = frozenset(),
        layers_leaving: int = 0,
    ) -> None:
        """`actions` are compute actions and moves to the host, in order; those in `paired` run beside the next. At most
        `layers_leaving` leave at once; 0: units move as a whole."""
        self.rank = rank
        self.given = tuple(actions)
        self.actions = list(_when_freed(self.given))
        away = {action.unit for action in self.given if action.kind is Kind.OFFLOAD}
        self.units_by_layer: UnitsByLayer | None = None
        if layers_leaving and away:
            self.actions = [action for action in self.actions if action.kind in COMPUTE_KINDS]
            self.units_by_layer = UnitsByLayer(self.actions, away, paired, layers_leaving)
        changes = [(action.kind, action.stage) for action in self.actions]
        self.changes = list(dict.fromkeys(changes))
        numbers = {change: number for number, change in enumerate(self.changes)}
        self.change_of_action = np.array([numbers[change] for change in changes])
        self.segment_of_action = np.array([action.segment for action in self.actions])
        self.computing = np.array([n for n, action in enumerate(self.actions) if action.kind in COMPUTE_KINDS])
        # Where the forwards of pairs are; the backward of each is the next action. Then the stages of both. [pairs, 2]
        self.pairs = np.array([n for n, action in enumerate(self.actions) if action in paired], dtype=int)
        stages = [(self.actions[n].stage, self.actions[n + 1].stage) for n in self.pairs]
        self.stages_of_pairs = np.array(stages, dtype=int).reshape(-1, 2)
        # Where each waiting message starts to wait, where it ends, and its segment. [messages, 3]
        self.messages = np.array(_messages_waiting(placement, self.actions, rank), dtype=int).reshape(-1, 3)


def rank_memory(
    setup: TrainingSetup, actions: Sequence[Action], rank: int, paired: Set[Action] = frozenset()
) -> Memory:
    """The memory of a rank at its peak; `actions` are its compute actions and moves to the host, in order, and those in
    `paired` run beside the next."""
    return memory_of_order(setup, RankOrder(setup.placement, rank, actions, paired, setup.layers_leaving))


def memory_of_order(setup: TrainingSetup, order: RankOrder) -> Memory:
    """The memory at its peak of a rank that runs this order."""
    rank = order.rank
    all_stages = setup.stages
    stages = [all_stages[stage] for stage in setup.placement.stages_of(rank)]
    layer_setup = setup.layer_setup  # set-ups that differ in their schedules share its changes
    changes = np.stack([changes_of(layer_setup, all_stages[stage], kind) for kind, stage in order.changes])
    of_actions = changes[order.change_of_action, order.segment_of_action]
    by_layer = order.units_by_layer
    if by_layer is not None:
        by_layer.stay_away(setup, of_actions)

    # Held while action i runs: what actions up to i added at their start, those before i at their end, and its own.
    added = of_actions[:, Phase.STARTS].copy()
    added[1:] += of_actions[:-1, Phase.ENDS]
    of_units = added.cumsum(axis=0)
    _run_beside(setup, order, of_units, of_actions)
    if by_layer is not None:
        of_units[:, Use.WORKING] += by_layer.bytes_on_their_way(setup)
    whole_weights, whole_gradients = _whole_chunks(setup, order.actions).T
    held = np.zeros((len(order.actions), len(_COLUMN)))
    held[:, _COLUMN["weights"]] = whole_weights
    held[:, _COLUMN["gradients"]] = whole_gradients
    held[:, _COLUMN["messages"]] = _bytes_waiting(setup, order)
    for use in Use:
        held[:, _COLUMN[use.name.lower()]] = of_units[:, use]

    peak = int(order.computing[held.sum(axis=1)[order.computing].argmax()])
    memory = dict(zip(_COLUMN, held[peak].tolist(), strict=True))
    state = static_memory(setup, rank)
    memory["weights"] += state.weights
    memory["gradients"] += state.gradients
    memory["optimizer"] += state.optimizer
    segments = _segments_held(order.actions, peak)
    if not setup.model.learned_positions:  # rotary angles in 32 bit, which all layers and micro-batches share
        size = setup.model.latent.rotary_head_dim if setup.model.latent else setup.model.head_dim
        tokens = sum(setup.segments[segment] for segment in segments)
        memory["activations"] += 4 * tokens / setup.context_parallel * size
    # The gradient of one state of each layer goes back between the segments of a micro-batch.
    if any(len(part.segments) > 1 for part in setup.parts or (setup,)):
        of_stages = (sum(count * layer_state(setup, layer) for layer, count in stage.layers) for stage in stages)
        memory["states"] += max(of_stages)

    lengths = {setup.segments[segment] for segment in segments} if setup.parts else set(setup.segments)
    doublings = log2(max(1, len(lengths)))
    come_and_go = float(np.sum([memory[use] for use in _COME_AND_GO]))
    memory["reserved"] = (HELD_BACK + _FOR_EACH_DOUBLING * doublings) * come_and_go
    if stages[-1].is_last:
        memory["reserved"] += HELD_BACK_OF_LOGITS * loss_bytes(setup, max(setup.segments))
    return Memory(**memory)


def _run_beside(setup: TrainingSetup, order: RankOrder, held: Sizes, of_actions: Sizes) -> None:
    """Add what actions hold while they run to what units hold then, `held`. The two of a pair run beside each other,
    layer by layer: one goes forward, and adds what it keeps, while one goes backward, and frees it. So the pair holds
    most at its first layers, which count in place of its forward, or at its last, in place of its backward. There
    attention of the forward has run, about half of a layer, when experts go backward; and experts go backward and
    forward, and the logits of both come and go, one after the other. Chunks of unequal depth count as if they had as
    many layers as the shorter."""
    forward = order.pairs
    backward = forward + 1
    running_f = of_actions[forward, Phase.RUNS]
    running_b = of_actions[backward, Phase.RUNS]
    before = held[forward] - of_actions[forward, Phase.STARTS]
    held += of_actions[:, Phase.RUNS]
    if not len(forward):
        return
    depths = np.array([sum(count for _, count in stage.layers) for stage in setup.stages])
    one_layer = 1 / np.maximum(1, depths[order.stages_of_pairs].min(axis=1))[:, None]  # as a part of its chunk
    added = of_actions[forward, Phase.STARTS] + of_actions[backward, Phase.STARTS]
    freed = of_actions[backward, Phase.ENDS]
    working = np.maximum(running_f, running_b)
    if setup.repeats("E"):  # tokens of the forward travel, half of what it holds, while those of the backward are back
        working += running_f / 2
    # At the first layers half a layer is added; at the last all but half a layer is, and all but one layer is freed.
    held[forward] = before + added * one_layer / 2 + working
    held[backward] = before + added * (1 - one_layer / 2) + freed * (1 - one_layer) + working
    # The loss is at one end: the pair begins with that of the backward, and ends with that of the forward.
    logits = Use.LOGITS
    held[forward, logits] = (before + running_b)[:, logits]
    held[backward, logits] = (before + added + freed + running_f)[:, logits]


def _segments_held(order: Sequence[Action], peak: int) -> set[int]:
    """The segments, of any micro-batch, that the rank holds activations of while action `peak` runs."""
    ended = {action.unit for action in order[:peak] if action.kind.facts.gives_weight_gradient}
    forwards = (action for action in order[: peak + 1] if action.kind is Kind.F)
    return {action.segment for action in forwards if action.unit not in ended}


class Waiting(NamedTuple):
    """A message of a segment waits from one action of a rank up to another."""

    start: int
    end: int
    segment: int


def _messages_waiting(placement: Placement, actions: Sequence[Action], rank: int) -> list[Waiting]:
    """Messages received for the next action, since receives are posted one action ahead, and messages that the other
    end has not yet taken. The last rank keeps outputs, and the first one gradients, until all units of a group have
    passed a chunk and the next chunk is at work there, one hop after another."""
    hops = placement.num_ranks
    chunk_of = placement.chunk_of
    messages = channels_of(placement, rank)
    waiting = []
    numbers = [number for number, action in enumerate(actions) if action.kind in COMPUTE_KINDS]
    for number, following in pairwise(numbers):
        kind, stage, _, segment = actions[following]
        receives = kind.facts.receives
        if receives is not None and (receives, stage) in messages:
            waiting.append(Waiting(number, number + 1, segment))
    for send in (kind for kind in Kind if kind.facts.is_send):
        hop = send.facts.hop
        leaving = {stage for kind, stage in messages if kind is send and chunk_of(stage) != chunk_of(stage + hop)}
        if not leaving:
            continue
        places: dict[Unit, int] = {}  # of the actions that make these messages, among compute actions
        for place, number in enumerate(numbers):
            if actions[number].kind.facts.sends is send:
                places[actions[number].unit] = place
        for (stage, microbatch, segment), place in places.items():
            taken = places.get((stage + hop * hops, microbatch, segment), len(numbers)) - hops
            if stage in leaving and taken > place:
                waiting.append(Waiting(numbers[place] + 1, numbers[taken] + 1, segment))
    return waiting


def _bytes_waiting(setup: TrainingSetup, order: RankOrder) -> Sizes:
    """The bytes of the messages that wait at each action."""
    sizes = np.array([setup.residual(length) for length in setup.segments])
    starts, ends, segments = order.messages.T
    changes = np.zeros(len(order.actions) + 1)
    np.add.at(changes, starts, sizes[segments])
    np.subtract.at(changes, ends, sizes[segments])
    return changes[:-1].cumsum()


def _when_freed(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions, each OFFLOAD where it has freed its memory: at the next one, or at its own RELOAD."""
    leaving = None
    back = None
    for action in actions:
        is_offload = action.kind is Kind.OFFLOAD
        if leaving is not None and (is_offload or action == back):
            yield leaving
            leaving = None
        if is_offload:
            leaving = action
            back = action._replace(kind=Kind.RELOAD)
        else:
            yield action
