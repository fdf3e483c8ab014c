"""When messages are issued where streams may share a hardware queue of the GPU.

A queue starts operations in the order of issue, and one that cannot start blocks all behind it. A send or receive
cannot start before the previous one of its channel has ended, a compute action not before its message has arrived. With
CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands for tensor parallelism before Blackwell, all streams of a rank
share one queue. The order made here cannot hang then, nor with more queues, which only block less.

All ranks agree on one common order of operations, and each issues its own part of it. Compute actions are placed by
nominal times (their starts if all take equally long, or the ticks of their clock), so each follows its dependencies. On
every channel

- a send comes after the compute action that makes the message, and after the receive of the message before;
- a receive comes one compute action ahead of the action that needs it, or where the receive of a later message does,
  but after the send of the message before.

Why every operation starts: take the first in the common order that does not. Everything before it has started, on all
ranks, so its own queue is free, compute has ended, and each message with both ends before it has arrived. A send or
receive needs the message before; both ends of that come before it. A compute action needs its own message. Follow the
rules back from the send or receive of that message until one of them alone sets the point: the computation of this or
an earlier message, or the place of its receive, at most one action ahead of its use. Both are before the compute
action. So it starts, whatever the real durations are, and however many messages a channel buffers.

In turn: where a GPU must not wait for a message while its rank starts a kernel, both ends of a message stand at one
point of the common order, the later of their two, and each rank waits for the end of a message before it goes on. The
first message in that order that has not ended does end, since everything before it, on both of its ranks, is done. By
the same argument it arrives before its use.

Tested in schedule/test_channels.py.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from .action import Action
from .cost_tables import Costs
from .schedule import Schedule
from .timing import run

# A point of the common order: nominal time, rank and index of a compute action, and the position relative to it.
_Point = tuple[float, int, int, int]
_BEFORE = 0
_ITSELF = 1
_AFTER = 2

# For each rank, the nominal times of its compute actions, in the order in which it runs them; a pair counts as one.
NominalTimes = Sequence[Sequence[float]] | Mapping[int, Sequence[float]]


class Transfer(NamedTuple):
    """A message: its send follows compute action number `sent` of rank `source`, and its receive comes ahead of number
    `posted` of rank `destination`. A pair counts as one action."""

    send: Action
    receive: Action
    source: int
    sent: int
    destination: int
    posted: int


@lru_cache(maxsize=1)  # a rank lowers a schedule once for its first step, and once for all later ones
def nominal_times(schedule: Schedule) -> NominalTimes:
    """When the compute actions of each rank start if all take equally long, and messages a tenth of that: ties would
    put some receives ahead of sends that are sooner in practice. A pair has one time."""
    ranks = run(schedule, Costs.uniform(schedule.shape, message=0.1))
    times = []
    for rank, spans in enumerate(ranks):
        start_of = {action: start for action, start, _ in spans}
        times.append([start_of[place[0]] for place in schedule.places(rank)])
    return times


def issue_order(
    channels: Sequence[Sequence[Transfer]], rank: int, times: NominalTimes, in_turn: bool = False
) -> Iterator[tuple[int, Action]]:
    """Sends and receives of a rank in order, each with the number of compute actions before it, from the messages of
    each of its channels in order."""
    events: list[tuple[_Point, int, Transfer, Action]] = []  # at equal points both ends go by the messages
    for transfers in channels:
        # The points of the previous message of the channel.
        send: _Point = (0.0, -1, -1, _BEFORE)
        receive = send
        for number, message in enumerate(transfers):
            posted = (times[message.destination][message.posted], message.destination, message.posted, _BEFORE)
            computed = (times[message.source][message.sent], message.source, message.sent, _AFTER)
            # Either end comes after the other end of the message before.
            send, receive = max(computed, receive), max(posted, send)
            is_sender = message.source == rank
            action = message.send if is_sender else message.receive
            point = send if is_sender else receive
            if in_turn:
                point = max(send, receive)
            events.append((point, number, message, action))
    compute = [(time, rank, index, _ITSELF) for index, time in enumerate(times[rank])]
    for point, _, _, action in sorted(events):
        yield bisect_left(compute, point), action
