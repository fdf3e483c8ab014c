"""Lowering: pure functions that turn the compute actions of a schedule into all actions of a rank.

Adds the messages between ranks (SEND_*, RECV_*), the start of gathering parameters before the first forward of a model
chunk (GATHER), and the start of reducing gradients after its last backward (REDUCE). Both disturb compute, so all ranks
start them at about the same time, as with Megatron's --align-param-gather and --align-grad-reduce.

A channel carries one payload (F or B) from one rank to another: a FIFO without tags. Sends and receives do not block a
rank. A send follows the action that produces the value. A receive is posted one compute action ahead of the action that
needs it, so that the transfer overlaps with compute, or earlier if a later message of its channel is needed sooner.

Why it cannot hang, if the compute actions alone have no cycle of dependencies: a rank posts the receives of a channel
in the order of its sends, so the n-th receive meets the n-th send. A rank waits only in front of a compute action, for
its message. Take the first compute action that never runs, in an order that respects all dependencies and the order of
each rank. Its sender has issued this send and all earlier ones of the channel, its own rank has posted their receives.
So they all meet and the message arrives, which contradicts the assumption.

A communicator that runs its operations one after the other (NCCL) may therefore serve one channel on each rank, not
both directions of a payload: rank 1 would post the receive of F1 from rank 0 ahead of computing F0, the send of F0 to
rank 2 would queue behind it, and rank 0 may need a result of F0 from rank 2 before it computes F1.
`Channel.communicator` numbers channels accordingly.

The proof does not hold where streams share a hardware queue of the GPU, the usual case: a second send or receive on a
channel waits for the first, and blocks everything issued behind it, including compute. `one_queue.py` finds an order of
messages for that.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise, product
from typing import NamedTuple

from .action import Action
from .clock import Clock
from .kinds import MESSAGE_KINDS, MOVE_KINDS, PAYLOADS, Kind
from .one_queue import NominalTimes, Transfer, issue_order, nominal_times
from .schedule import Place, Placement, Schedule, Shape, places

# The most actions, over all ranks, that are simulated for nominal times when training starts.
_MOST_SIMULATED = 250_000

# The compute actions of each rank, those of a pair at one place.
Order = Sequence[Place]
Orders = Sequence[Order] | Mapping[int, Order]


class Channel(NamedTuple):
    """One direction of one payload (Kind.F or Kind.B) between two ranks."""

    payload: Kind
    source: int
    destination: int

    @property
    def communicator(self) -> tuple[Kind, bool, int]:
        """Payload, whether it goes to a higher rank, parity of the source. A rank has at most one channel with equal
        values, so these may share a communicator of all ranks."""
        return self.payload, self.destination > self.source, self.source % 2


def channels_of(placement: Placement, rank: int) -> dict[tuple[Kind, int], Channel]:
    """The channels between this rank and others, by kind of message and stage of this rank."""
    channels = {}
    for stage, kind in product(placement.stages_of(rank), MESSAGE_KINDS):
        facts = kind.facts
        other_stage = stage + facts.hop
        if facts.payload is None or not 0 <= other_stage < placement.num_stages:
            continue
        other = placement.rank_of(other_stage)
        if other == rank:
            continue
        if facts.is_send:
            channels[kind, stage] = Channel(facts.payload, source=rank, destination=other)
        else:
            channels[kind, stage] = Channel(facts.payload, source=other, destination=rank)
    return channels


def lower(schedule: Schedule, one_queue: bool = False, in_turn: bool = False) -> Schedule:
    """The whole schedule with messages, gathering and reduction added; moves stay right before their compute actions.
    The messages of a pair surround both of its actions.

    With `one_queue` it cannot hang where streams share hardware queues, but messages may be delayed. With `in_turn` it
    cannot hang where each rank waits for the end of a message before it goes on.
    """
    plain = schedule.without_moves()
    shape = schedule.shape
    times = nominal_times(plain) if one_queue or in_turn else None
    orders = [plain.places(rank) for rank in range(shape.num_ranks)]
    transfers = {}
    for source in range(shape.num_ranks):
        for destination in shape.placement.neighbours_of(source):
            transfers[source, destination] = _transfers(shape, orders, source, destination)
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        ranks.append(tuple(_merged(shape, rank, orders[rank], actions, transfers, times, in_turn)))
    return Schedule(shape, tuple(ranks), schedule.paired)


class _RankInput(NamedTuple):
    """What the lowering of one rank reads of a schedule."""

    actions: Sequence[Action]  # of this rank, moves among them
    orders: Mapping[int, Order]  # of this rank and its neighbours
    times: NominalTimes | None  # of the same ranks, if messages are ordered by them


def lower_rank(source: Schedule | Clock, rank: int, one_queue: bool = False, in_turn: bool = False) -> list[Action]:
    """`lower` for one rank. Of a clock only the orders of this rank and its neighbours are computed. If it has many
    actions, its ticks serve as nominal times, since a simulation would take seconds; on one queue that costs up to 3 %
    of such a step."""
    shape = source.shape
    needs_times = one_queue or in_turn
    if isinstance(source, Clock) and needs_times and source.num_actions <= _MOST_SIMULATED:
        source = source.schedule()
    if isinstance(source, Clock):
        given = _input_of_clock(source, rank, needs_times)
    else:
        given = _input_of_schedule(source, rank, needs_times)
    transfers = {}
    for near in shape.placement.neighbours_of(rank):
        transfers[near, rank] = _transfers(shape, given.orders, near, rank)
        transfers[rank, near] = _transfers(shape, given.orders, rank, near)
    return _merged(shape, rank, given.orders[rank], given.actions, transfers, given.times, in_turn)


def _input_of_clock(clock: Clock, rank: int, needs_times: bool) -> _RankInput:
    orders: dict[int, Order] = {}
    ticks: dict[int, Sequence[float]] = {}
    for near in (rank, *clock.shape.placement.neighbours_of(rank)):
        actions = clock.order(near)
        orders[near] = places(actions, clock.pairs_in(actions))
        if needs_times:
            ticks[near] = clock.ticks([place[0] for place in orders[near]])
    own_actions = [action for place in orders[rank] for action in place]
    return _RankInput(own_actions, orders, ticks if needs_times else None)


def _input_of_schedule(schedule: Schedule, rank: int, needs_times: bool) -> _RankInput:
    plain = schedule.without_moves()
    ranks = (rank, *schedule.shape.placement.neighbours_of(rank))
    orders = {near: plain.places(near) for near in ranks}
    return _RankInput(schedule.ranks[rank], orders, nominal_times(plain) if needs_times else None)


class _Merge:
    """The actions to add in front of and behind the places of a rank."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._before: list[list[Action]] = [[] for _ in order]
        self._after: list[list[Action]] = [[] for _ in order]

    def add_before(self, number: int, action: Action) -> None:
        self._before[number].append(action)

    def add_after(self, number: int, action: Action) -> None:
        self._after[number].append(action)

    def actions(self) -> list[Action]:
        """All actions, in order."""
        merged: list[Action] = []
        for before, place, after in zip(self._before, self._order, self._after, strict=True):
            merged += before
            merged += place
            merged += after
        return merged


def _merged(
    shape: Shape,
    rank: int,
    order: Order,
    actions: Sequence[Action],
    transfers: Mapping[tuple[int, int], list[list[Transfer]]],
    times: NominalTimes | None,
    in_turn: bool,
) -> list[Action]:
    """The compute `actions` and moves of a rank, in order, with all others around them. `order` has the compute actions
    by their places. `transfers` has the messages from one rank to another; by their nominal `times` they get an order
    for one queue, or in turn."""
    merge = _Merge(order)
    for number, action in _gathers(shape, order):
        merge.add_before(number, action)
    incoming: list[list[Transfer]] = []  # by channel
    outgoing: list[list[Transfer]] = []
    for near in shape.placement.neighbours_of(rank):
        incoming += transfers[near, rank]
        outgoing += transfers[rank, near]
    if times is None:
        for transfer in chain.from_iterable(incoming):
            merge.add_before(transfer.posted, transfer.receive)
        for transfer in chain.from_iterable(outgoing):
            merge.add_after(transfer.sent, transfer.send)
    else:
        for num_before, action in issue_order([*incoming, *outgoing], rank, times, in_turn):
            if num_before == 0:
                merge.add_before(0, action)
            else:
                merge.add_after(num_before - 1, action)
    for number, action in _reductions(shape, order):
        merge.add_after(number, action)
    number_of = {action: number for number, action in _numbered(order)}
    following = 0  # the number of the place behind the action
    for action in actions:
        if action.kind in MOVE_KINDS:
            merge.add_before(following, action)
        else:
            following = number_of[action] + 1
    return merge.actions()


def partition_state(lowered: Sequence[Action]) -> list[Action]:
    """The actions of a rank that keeps the parameters of at most two model chunks: the one at work, while F, B and I of
    its stage follow one another, and the next, which is gathered meanwhile. W needs no parameters."""
    needing = [action.stage for action in lowered if action.kind.facts.needs_parameters]
    turns = [stage for stage, _ in groupby(needing)]  # the chunk at work, as these follow one another
    result: list[Action] = []
    gathered: list[int] = []  # the stages of the chunks that have their parameters
    turn = -1  # the index in `turns` of the chunk at work
    for action in lowered:
        if action.kind is Kind.GATHER:
            continue
        if action.kind.facts.needs_parameters and (turn < 0 or action.stage != turns[turn]):
            turn += 1
            wanted = list(dict.fromkeys(turns[turn : turn + 2]))
            result += [Action(Kind.RELEASE, stage) for stage in gathered if stage not in wanted]
            result += [Action(Kind.GATHER, stage) for stage in wanted if stage not in gathered]
            gathered = wanted
        result.append(action)
    return result + [Action(Kind.RELEASE, stage) for stage in gathered]


def _transfers(shape: Shape, orders: Orders, source: int, destination: int) -> list[list[Transfer]]:
    """The messages from one rank to another: for each channel between them, in the order of its sends."""
    incoming = channels_of(shape.placement, destination)
    outgoing = channels_of(shape.placement, source)
    expected = {key for key, channel in incoming.items() if channel.source == source}
    receive_kinds = {kind.facts.payload: kind for kind in MESSAGE_KINDS if not kind.facts.is_send}
    consumers = {}  # the receive of a message -> index of the action that waits for it
    for index, (kind, stage, microbatch, segment) in _numbered(orders[destination]):
        receive_kind = kind.facts.receives
        if (receive_kind, stage) in expected:
            consumers[receive_kind, stage, microbatch, segment] = index

    channels: dict[Kind, list[Transfer]] = {payload: [] for payload in PAYLOADS}
    # From the last message back: a receive is posted no later than those that follow it.
    post = dict.fromkeys(channels, len(orders[destination]))
    for sent, (kind, stage, microbatch, segment) in reversed(_numbered(orders[source])):
        send_kind = kind.facts.sends
        if send_kind is None or (send_kind, stage) not in outgoing:
            continue
        payload = outgoing[send_kind, stage].payload
        receive_kind = receive_kinds[payload]
        receiver = stage + send_kind.facts.hop
        consumer = consumers.pop((receive_kind, receiver, microbatch, segment), None)
        if consumer is None:  # the message goes to another rank
            continue
        if consumer <= post[payload]:
            post[payload] = max(consumer - 1, 0)
        channels[payload].append(
            Transfer(
                send=Action(send_kind, stage, microbatch, segment),
                receive=Action(receive_kind, receiver, microbatch, segment),
                source=source,
                sent=sent,
                destination=destination,
                posted=post[payload],
            )
        )
    if consumers:
        raise ValueError(f"rank {destination} needs messages that rank {source} does not send; is this valid?")
    return [list(reversed(transfers)) for transfers in channels.values() if transfers]


def _numbered(order: Order) -> list[tuple[int, Action]]:
    """The actions of a rank with the numbers of their places."""
    return [(index, action) for index, place in enumerate(order) for action in place]


def _gathers(shape: Shape, order: Order) -> Iterator[tuple[int, Action]]:
    """Gather chunks 0 and 1 at once, chunk c + 1 when the first rank starts chunk c."""
    forwards = [(index, action.stage) for index, action in _numbered(order) if action.kind is Kind.F]
    firsts: dict[int, int] = {}  # first forward of each stage, in the order of starts
    for number, (_, stage) in enumerate(forwards):
        firsts.setdefault(stage, number)
    stages = list(firsts)
    for stage in stages[:2]:
        yield 0, Action(Kind.GATHER, stage)
    for before, stage in pairwise(stages[1:]):
        # The forwards of `before` start one tick later on each next rank.
        index, _ = forwards[max(firsts[before] - before % shape.num_ranks, 0)]
        yield index, Action(Kind.GATHER, stage)


def _reductions(shape: Shape, order: Order) -> Iterator[tuple[int, Action]]:
    """Reduce a chunk when the last rank has finished it, or at the end of the step."""
    ends = [(index, action.stage) for index, action in _numbered(order) if action.kind.facts.gives_weight_gradient]
    last = {stage: number for number, (_, stage) in enumerate(ends)}
    for stage, number in last.items():
        late = number + stage % shape.num_ranks  # its backwards end that many ticks before those of the first stage
        index = ends[late][0] if late < len(ends) else len(order) - 1
        yield index, Action(Kind.REDUCE, stage)
