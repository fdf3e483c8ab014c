"""A lowered schedule in simulated time: every rank does what the interpreter does, in the same order.

A message needs both of its ends: it starts when it has been sent, its receive has been posted and the message before it
on the channel has arrived. Sends and receives do not hold up a rank; a compute action waits for its message. A rank
gathers and reduces the chunks of its model on one more stream, one after the other, beside its compute: what needs the
parameters of a chunk waits for them, the end of the step for all gradients. Copies to the memory of the host, and back,
run on two more, one after the other: a backward waits for its own, and a unit that sets out for the one before it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...schedule import COMPUTE_KINDS, MOVE_KINDS, Channel, Costs, Kind, Schedule, Span, Timeline, channels_of
from ...schedule.cost_tables import Table

_COMPUTE = frozenset(COMPUTE_KINDS)
_BACKWARD = (Kind.B, Kind.I)
_INPUT = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


@dataclass(frozen=True)
class ChunkCollectives:
    """Seconds that the parameters of each stage take to gather and its gradients to reduce, beside compute."""

    gather: tuple[float, ...]
    reduce: tuple[float, ...]


def execute_lowered(
    lowered: Schedule, costs: Costs, collectives: ChunkCollectives | None = None, copies: Table = ()
) -> Timeline:
    """The timeline of the compute actions, of GATHER and REDUCE where there are `collectives`, and of moves, which take
    the seconds in `copies`, by stage and segment.

    Raises ValueError if the costs do not fit, or if the schedule cannot run to its end.
    """
    costs.check(lowered.shape)
    return _Machine(lowered, costs, collectives, copies).run()


@dataclass
class _Messages:
    """The messages of one channel, in the order of its sends."""

    sent: list[tuple[float, float]] = field(default_factory=list)  # when, and how long it takes
    posted: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    received: int = 0
    waiting: int | None = None  # the rank that cannot go on without the next message

    def deliver(self) -> bool:
        """Whether another message has arrived."""
        number = len(self.arrived)
        while len(self.arrived) < min(len(self.sent), len(self.posted)):
            start, seconds = self.sent[len(self.arrived)]
            before = self.arrived[-1] if self.arrived else 0.0
            self.arrived.append(max(start, self.posted[len(self.arrived)], before) + seconds)
        return len(self.arrived) > number


class _Machine:
    def __init__(
        self, lowered: Schedule, costs: Costs, collectives: ChunkCollectives | None, copies: Table = ()
    ) -> None:
        self.schedule, self.costs, self.collectives, self.copies = lowered, costs, collectives, copies
        queues: defaultdict[Channel, _Messages] = defaultdict(_Messages)
        placement = lowered.shape.placement
        # By kind of message and stage.
        self.channels = {
            key: queues[channel]
            for rank in range(placement.num_ranks)
            for key, channel in channels_of(placement, rank).items()
        }
        self.spans: list[list[Span]] = [[] for _ in lowered.ranks]
        self.runnable = list(range(len(lowered.ranks)))

    def run(self) -> Timeline:
        ranks = [self._advance(rank) for rank in self.runnable]
        ended = 0
        while self.runnable:
            rank = self.runnable.pop()
            queue = next(ranks[rank], None)
            if queue is None:
                ended += 1
            else:
                queue.waiting = rank
        if ended < len(ranks):
            raise ValueError("the schedule cannot run to its end; validate it to see why")
        # GATHER and REDUCE may start after compute that they were put before.
        in_order = (tuple(sorted(spans, key=lambda span: span.start)) for spans in self.spans)
        return Timeline(self.schedule.shape, tuple(in_order), "s")

    def _advance(self, rank: int) -> Iterator[_Messages]:
        """Runs a rank; yields the queue whenever it has to wait for the next message of one."""
        spans, channels, costs = self.spans[rank], self.channels, self.costs
        f, i, w = costs.f, costs.i, costs.w
        now = aside = 0.0  # the ends of compute, and of gathering and reducing
        parameters: dict[int, float] = {}  # when those of a stage are there
        out = back = 0.0  # the ends of copies to the host, and back
        there: dict[tuple[int, ...], float] = {}  # when the last copy of a unit has ended
        for action in self.schedule.ranks[rank]:
            kind, stage, _, segment = action
            if kind in _COMPUTE:
                queue = channels.get((_INPUT[kind], stage)) if kind is not Kind.W else None
                if queue is not None:
                    while len(queue.arrived) <= queue.received:
                        yield queue
                    now = max(now, queue.arrived[queue.received])
                    queue.received += 1
                if kind in _BACKWARD:
                    now = max(now, there.pop(action[1:], 0.0))
                if kind is not Kind.W:
                    now = max(now, parameters.get(stage, 0.0))
                if kind is Kind.F:
                    end = now + f[stage][segment]
                else:
                    end = now + (w[stage][segment] if kind is Kind.W else i[stage][segment])
                    end += w[stage][segment] if kind is Kind.B else 0.0
                spans.append(Span(action, now, end))
                now = end
            elif kind in MOVE_KINDS:
                seconds = self.copies[stage][segment]
                if kind is Kind.OFFLOAD:
                    start = now = max(now, out)
                    out = end = start + seconds
                else:
                    start = max(now, back, there[action[1:]])
                    back = end = start + seconds
                there[action[1:]] = end
                spans.append(Span(action, start, end))
            elif kind in (Kind.GATHER, Kind.REDUCE):
                if self.collectives is not None:
                    is_gather = kind is Kind.GATHER
                    start = max(now, aside)
                    aside = start + (self.collectives.gather if is_gather else self.collectives.reduce)[stage]
                    if is_gather:
                        parameters[stage] = aside
                    spans.append(Span(action, start, aside))
            elif kind is not Kind.RELEASE:
                queue = channels[kind, stage]
                if kind is Kind.SEND_F:
                    queue.sent.append((now, costs.message_f[stage][segment]))
                elif kind is Kind.SEND_B:
                    queue.sent.append((now, costs.message_b[stage][segment]))
                else:
                    queue.posted.append(now)
                if queue.deliver() and queue.waiting is not None:
                    self.runnable.append(queue.waiting)
                    queue.waiting = None


def compute_only(timeline: Timeline) -> Timeline:
    """The timeline without GATHER, REDUCE and moves."""
    ranks = (tuple(span for span in spans if span.action.kind in _COMPUTE) for spans in timeline.ranks)
    return Timeline(timeline.shape, tuple(ranks), timeline.time_unit, timeline.meta)
