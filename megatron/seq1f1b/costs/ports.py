"""What ranks send to each other, in simulated time.

A channel carries one payload from one rank to another, one message after the other: a message starts when it has been
sent, its receive has been posted and the one before it has arrived. All that a rank sends leaves by one port, and the
messages on their way share its bandwidth evenly.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappush

# Time, rank, and the number of an arrival: at this time a message that the rank sent arrives, or, if the number is 0,
# the rank goes on. A plain tuple, since a simulated step makes some hundred thousand.
type Event = tuple[float, int, int]


@dataclass(eq=False)
class Port:
    """The port of a rank, whose bandwidth the messages that it sends share. Calls come in the order of their times. The
    message that arrives next, if no other starts before, is an event, and the last of these events counts."""

    rank: int
    events: list[Event]  # a heap
    left: "dict[MessageQueue, float]" = field(default_factory=dict)  # of messages on their way, the seconds if alone
    since: float = 0.0  # when `left` held
    last_event: int = 0  # its number

    def join(self, now: float, queue: "MessageQueue", seconds: float) -> None:
        """Start a message of the queue, which takes so many seconds if it is alone."""
        self._pass(now)
        self.left[queue] = seconds
        self._expect()

    def leave(self, now: float) -> "MessageQueue":
        """Take off the message that arrives now; returns the queue that it belongs to."""
        if len(self.left) == 1:
            return self.left.popitem()[0]
        self._pass(now)
        queue = min(self.left, key=self.left.__getitem__)
        del self.left[queue]
        self._expect()
        return queue

    def _pass(self, now: float) -> None:
        """Take off what has passed of each message until now, with an even share of the bandwidth."""
        if self.left:
            share = (now - self.since) / len(self.left)
            self.left = {queue: max(0.0, seconds - share) for queue, seconds in self.left.items()}
        self.since = now

    def _expect(self) -> None:
        time = self.since + len(self.left) * min(self.left.values())
        self.last_event += 1
        heappush(self.events, (time, self.rank, self.last_event))


@dataclass(eq=False)
class MessageQueue:
    """The messages of one channel that have not been received, in the order of its sends."""

    port: Port
    sent: deque[float] = field(default_factory=deque)  # seconds of those that have not started
    posted: int = 0  # receives that wait for a message to start
    arrived: deque[float] = field(default_factory=deque)  # times
    waiting: int | None = None  # the rank that needs the next message

    def send(self, now: float, seconds: float) -> None:
        """The next message may leave, and takes so many seconds if it is alone."""
        self.sent.append(seconds)
        self._start(now)

    def post(self, now: float) -> None:
        """One more message may arrive."""
        self.posted += 1
        self._start(now)

    def arrive(self, now: float) -> None:
        """The message on its way is there."""
        self.arrived.append(now)
        self._start(now)

    def _start(self, now: float) -> None:
        if self.sent and self.posted and self not in self.port.left:
            self.posted -= 1
            self.port.join(now, self, self.sent.popleft())
