"""A lowered schedule in simulated time, in the order of the interpreter.

A message starts when it has been sent, its receive has been posted and the message before it on the channel has
arrived. Sends and receives do not hold up a rank; a compute action waits for its message. Beside compute, and one after
the other, a rank gathers and reduces chunks, and copies units to the host and back. Actions wait for the parameters of
their chunk, the end of the step for all gradients, a backward for its unit, and an OFFLOAD for the one before it.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...schedule import COMPUTE_KINDS, Channel, Costs, Kind, Schedule, Span, Timeline, channels_of
from ...schedule.cost_tables import Table

_COMPUTE = frozenset(COMPUTE_KINDS)
_INPUT = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
# Actions of one lane run one after the other beside compute.
_LANES = {Kind.GATHER: "collectives", Kind.REDUCE: "collectives", Kind.OFFLOAD: "to the host", Kind.RELOAD: "back"}


@dataclass
class _Messages:
    """The messages of one channel that have not been received, in the order of its sends."""

    sent: deque[tuple[float, float]] = field(default_factory=deque)  # start, seconds
    posted: deque[float] = field(default_factory=deque)
    arrived: float = 0.0  # the time of the last one that was received
    waiting: int | None = None  # the rank that needs the next message

    def receive(self) -> float:
        """The time at which the next message arrives."""
        start, seconds = self.sent.popleft()
        self.arrived = max(start, self.posted.popleft(), self.arrived) + seconds
        return self.arrived


def execute_lowered(lowered: Schedule, costs: Costs, aside: Mapping[Kind, Table] | None = None) -> Timeline:
    """The timeline of the compute actions, and of GATHER, REDUCE, OFFLOAD and RELOAD if `aside` has the seconds of the
    kind, by stage and segment. Raises ValueError if the costs do not fit, or if the schedule cannot run to its end."""
    costs.check(lowered.shape)
    aside, placement = aside or {}, lowered.shape.placement
    parts = {Kind.F: (costs.f,), Kind.B: (costs.i, costs.w), Kind.I: (costs.i,), Kind.W: (costs.w,)}
    messages = {Kind.SEND_F: costs.message_f, Kind.SEND_B: costs.message_b}
    queues: defaultdict[Channel, _Messages] = defaultdict(_Messages)
    channels = {  # by kind of message and stage
        key: queues[channel]
        for rank in range(placement.num_ranks)
        for key, channel in channels_of(placement, rank).items()
    }
    runnable = list(range(len(lowered.ranks)))

    def run(rank: int, spans: list[Span]) -> Iterator[_Messages]:
        """Runs a rank; yields the queue of each message that has not been sent."""
        now = 0.0
        lanes = dict.fromkeys(_LANES.values(), 0.0)  # the end of each
        parameters: dict[int, float] = {}  # the times at which those of a stage are complete
        there: dict[tuple[int, ...], float] = {}  # the ends of the last copies of units
        for action in lowered.ranks[rank]:
            kind, stage, _, segment = action
            if kind in _COMPUTE:
                if kind is not Kind.W:
                    if (queue := channels.get((_INPUT[kind], stage))) is not None:
                        while not (queue.sent and queue.posted):
                            yield queue
                        now = max(now, queue.receive())
                    now = max(now, parameters.get(stage, 0.0))
                    if kind is not Kind.F:
                        now = max(now, there.pop(action[1:], 0.0))
                end = now
                for table in parts[kind]:
                    end += table[stage][segment]
                spans.append(Span(action, now, end))
                now = end
            elif kind in aside:
                start = max(now, lanes[_LANES[kind]], there.get(action[1:], 0.0))
                end = lanes[_LANES[kind]] = start + aside[kind][stage][segment]
                spans.append(Span(action, start, end))
                if kind is Kind.GATHER:
                    parameters[stage] = end
                elif kind is not Kind.REDUCE:
                    there[action[1:]] = end
                if kind is Kind.OFFLOAD:  # waits for the one before it
                    now = start
            elif kind in messages and (kind, stage) in channels:
                queue = channels[kind, stage]
                queue.sent.append((now, messages[kind][stage][segment]))
                if queue.waiting is not None:
                    runnable.append(queue.waiting)
                    queue.waiting = None
            elif (kind, stage) in channels:
                channels[kind, stage].posted.append(now)

    spans: list[list[Span]] = [[] for _ in lowered.ranks]
    ranks = [run(rank, spans[rank]) for rank in runnable]
    left = set(runnable)
    while runnable:
        rank = runnable.pop()
        queue = next(ranks[rank], None)
        if queue is None:
            left.remove(rank)
        else:
            queue.waiting = rank
    if left:
        raise ValueError("the schedule cannot run to its end; validate it to see why")
    # GATHER and REDUCE may start after compute that they were put before.
    in_order = (tuple(sorted(each, key=lambda span: span.start)) for each in spans)
    return Timeline(lowered.shape, tuple(in_order), "s")
