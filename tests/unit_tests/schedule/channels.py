"""Runs a lowered schedule on channels as strict as those of NCCL, in simulated time.

A channel is a FIFO without tags. A message starts when both its send and its receive are posted and those of the
message before have ended; a channel buffers `buffered` messages, none if not given. Compute goes on meanwhile.

With `one_queue` all operations of a rank pass through one hardware queue, as on a GPU with
CUDA_DEVICE_MAX_CONNECTIONS=1: an operation leaves the queue when it starts, so one that has to wait for the operation
before it on its channel, or for a message, holds up all behind it. With `in_turn` the host waits for the end of each
operation.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from megatron.seq1f1b.schedule import COMPUTE_KINDS, Action, Kind
from megatron.seq1f1b.schedule.cost_tables import Costs
from megatron.seq1f1b.schedule.dependencies import message_needed
from megatron.seq1f1b.schedule.lowering import Channel, channels_of
from megatron.seq1f1b.schedule.schedule import Schedule
from megatron.seq1f1b.schedule.timeline import Span, Timeline


class HangError(RuntimeError):
    """The ranks wait for each other for ever, or a receive meets the message of another action."""


@dataclass
class _End:
    """One end of a channel: the operations that its rank has posted and that have not run."""

    posted: deque[tuple[Action, float]] = field(default_factory=deque)
    free: float = 0.0  # when the last operation that ran has ended


def execute(lowered: Schedule, costs: Costs | None = None, *, one_queue=False, in_turn=False, buffered=0) -> Timeline:
    """The timeline of the compute actions. Raises HangError, with what every rank and channel waits for."""
    shape, ranks = lowered.shape, lowered.ranks
    costs = costs or Costs.uniform(shape)
    channels = [channels_of(shape.placement, rank) for rank in range(len(ranks))]
    ends = defaultdict(_End)  # by channel and whether it is the end that sends
    buffers = defaultdict(deque)
    arrived = {None: 0.0}
    spans = [[] for _ in ranks]
    now, index = [0.0] * len(ranks), [0] * len(ranks)
    waiting = [()] * len(ranks)  # the forward of a pair, until its backward can run

    def transfer(channel: Channel) -> None:
        """Runs all transfers of the channel that can run."""
        send, receive, buffer = ends[channel, True], ends[channel, False], buffers[channel]
        table = costs.message_f if channel.payload is Kind.F else costs.message_b
        while True:
            if send.posted and (len(buffer) < buffered or (receive.posted and not buffer)):
                sent, start = send.posted.popleft()
                start = max(start, send.free)
                if not buffered:
                    start = max(start, receive.posted[0][1], receive.free)
                send.free = start + table[sent.stage][sent.segment]
                buffer.append((sent, send.free))
            elif buffer and receive.posted:
                (sent, end), (received, start) = buffer.popleft(), receive.posted.popleft()
                value = sent._replace(kind=channel.payload)
                if message_needed(received._replace(kind=channel.payload), shape) != value:
                    raise HangError(f"{received} meets {sent} on {channel}")
                receive.free = arrived[value] = max(end, start, receive.free)
            else:
                return

    def runs(rank: int, action: Action) -> bool:
        """Runs the next action of a rank, unless that has to wait."""
        if in_turn and any(ends[each, rank == each.source].posted for each in channels[rank].values()):
            return False
        if action.kind in COMPUTE_KINDS:
            needed = message_needed(action, shape)
            if needed not in arrived:
                return False
            start = now[rank] = max(now[rank], arrived[needed])
            together, waiting[rank] = (*waiting[rank], action), ()
            if action in lowered.paired:
                waiting[rank] = together
                return True
            now[rank] += sum(costs.duration(each.kind, each.stage, each.segment) for each in together)
            spans[rank] += [Span(each, start, now[rank]) for each in together]
        elif channel := channels[rank].get(action[:2]):
            end = ends[channel, rank == channel.source]
            if one_queue and end.posted:
                return False
            if one_queue:
                now[rank] = max(now[rank], end.free)
            end.posted.append((action, now[rank]))
            transfer(channel)
        return True

    before = None
    while index != before:
        before = list(index)
        for rank, actions in enumerate(ranks):
            while index[rank] < len(actions) and runs(rank, actions[index[rank]]):
                index[rank] += 1
    waits = [f"rank {rank} waits at {ranks[rank][at]}" for rank, at in enumerate(index) if at < len(ranks[rank])]
    waits += [f"{channel}: {end.posted}" for (channel, _), end in ends.items() if end.posted]
    if waits:
        raise HangError("\n".join(waits))
    return Timeline(shape, tuple(map(tuple, spans)))
