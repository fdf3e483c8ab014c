"""Runs a lowered schedule on channels as strict as those of NCCL, in simulated time.

A channel is a FIFO without tags. A transfer starts when both its send and its receive are posted
and at the front of their communicators: on a rank, the operations of one communicator run one after
the other, in the order in which they were posted. A channel buffers `buffered` messages, none if
not given. Compute goes on meanwhile.

With `one_queue` all operations of a rank pass through one hardware queue, as on a GPU with
CUDA_DEVICE_MAX_CONNECTIONS=1: an operation leaves the queue when it starts, so one that has to wait
for the operation before it on its communicator, or for a message, holds up all behind it.

With `loads_kernels` the first compute of a kind, stage and segment on a rank waits until no operation
of the rank is under way, as loading a kernel does. With `in_turn` the host waits for the end of each
operation.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from megatron.seq1f1b.schedule.action import COMPUTE_KINDS, MOVE_KINDS, Action, Kind
from megatron.seq1f1b.schedule.cost_tables import Costs
from megatron.seq1f1b.schedule.dependencies import message_needed, outcome
from megatron.seq1f1b.schedule.lowering import Channel, channels_of
from megatron.seq1f1b.schedule.schedule import Schedule
from megatron.seq1f1b.schedule.timeline import Span, Timeline

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_SENDS = (Kind.SEND_F, Kind.SEND_B)


class HangError(RuntimeError):
    """The ranks wait for each other for ever, or a receive meets the message of another action."""


@dataclass
class _Queue:
    """The operations that one rank has posted on one communicator and that have not run."""

    posted: deque[tuple[Channel, Action, float]] = field(default_factory=deque)
    free: float = 0.0  # when the last operation that ran has ended


def execute(lowered: Schedule, costs: Costs | None = None, **conditions: float) -> Timeline:
    """The timeline of the compute actions of a lowered schedule, under the conditions of `_Machine`.

    Raises HangError, with what every rank and queue waits for.
    """
    return _Machine(lowered, costs or Costs.uniform(lowered.shape), **conditions).run()


class _Machine:
    """Ranks wait `copy` for each move to the host; for the others see above."""

    def __init__(self, lowered, costs, *, one_queue=False, buffered=0, loads_kernels=False, in_turn=False, copy=0.0):
        costs.check(lowered.shape)
        self.lowered, self.shape, self.costs, self.copy = lowered, lowered.shape, costs, copy
        self.one_queue, self.room, self.loads_kernels, self.in_turn = one_queue, buffered, loads_kernels, in_turn
        self.loaded: list[set] = [set() for _ in lowered.ranks]
        self.buffers: dict[Channel, deque[tuple[Action, float]]] = {}
        self.queues: dict[tuple[int, Hashable], _Queue] = {}
        self.arrived: list[dict[Action, float]] = [{} for _ in lowered.ranks]
        self.spans: list[list[Span]] = [[] for _ in lowered.ranks]
        self.index = [0] * len(lowered.ranks)
        self.now = [0.0] * len(lowered.ranks)
        self.touched: list[tuple[int, Hashable]] = []  # queues whose front may have changed
        of_ranks = (channels_of(self.shape.placement, rank) for rank in range(len(lowered.ranks)))
        self.channels = {key: channel for channels in of_ranks for key, channel in channels.items()}

    def run(self) -> Timeline:
        runnable = list(range(len(self.lowered.ranks)))
        while runnable:
            for rank in runnable:
                self._advance(rank)
            runnable = self._transfer()
        if any(at < len(rank) for at, rank in zip(self.index, self.lowered.ranks, strict=True)):
            raise HangError(self._where())
        if any(queue.posted for queue in self.queues.values()):
            raise HangError("messages are left over\n" + self._where())
        return Timeline(self.shape, tuple(map(tuple, self.spans)))

    def _advance(self, rank: int) -> None:
        """Runs the rank up to the first action that has to wait."""
        actions = self.lowered.ranks[rank]
        while self.index[rank] < len(actions):
            action = actions[self.index[rank]]
            if self.in_turn and self._is_waited_for(rank):
                return
            if action.kind in COMPUTE_KINDS:
                kernels = action.kind, action.stage, action.segment
                if self.loads_kernels and kernels not in self.loaded[rank]:
                    if self._is_waited_for(rank):
                        return
                    self.loaded[rank].add(kernels)
                needed = message_needed(action, self.shape)
                if needed is not None:
                    if needed not in self.arrived[rank]:
                        return
                    self.now[rank] = max(self.now[rank], self.arrived[rank].pop(needed))
                start = self.now[rank]
                self.now[rank] += self.costs.duration(action.kind, action.stage, action.segment)
                self.spans[rank].append(Span(action, start, self.now[rank]))
            elif action.kind in _SENDS or action.kind in _RECEIVES:
                channel = self.channels[action[:2]]
                key = rank, channel.communicator
                queue = self.queues.setdefault(key, _Queue())
                if self.one_queue:
                    if queue.posted:
                        return
                    self.now[rank] = max(self.now[rank], queue.free)
                queue.posted.append((channel, action, self.now[rank]))
                self.touched.append(key)
            elif action.kind in MOVE_KINDS:
                self.now[rank] += self.copy
            self.index[rank] += 1

    def _is_waited_for(self, rank: int) -> bool:
        """Whether an operation of the rank is under way."""
        return any(queue.posted for (owner, _), queue in self.queues.items() if owner == rank)

    def _transfer(self) -> list[int]:
        """Runs all transfers that can run; returns the ranks for which something has changed."""
        changed = set()
        while self.touched:
            key = self.touched.pop()
            if not self.queues[key].posted:
                continue
            channel = self.queues[key].posted[0][0]
            shared = channel.communicator
            source = self.queues.get((channel.source, shared))
            destination = self.queues.get((channel.destination, shared))
            buffer = self.buffers.setdefault(channel, deque())
            receiving = self._in_front(destination, channel, _RECEIVES)
            if self._in_front(source, channel, _SENDS) and (len(buffer) < self.room or (receiving and not buffer)):
                _, send, start = source.posted.popleft()
                start = max(start, source.free)
                if len(buffer) == self.room:
                    start = max(start, destination.posted[0][2], destination.free)
                table = self.costs.message_f if channel.payload is Kind.F else self.costs.message_b
                source.free = start + table[send.stage][send.segment]
                buffer.append((send, source.free))
                changed.add(channel.source)
            if not (buffer and receiving):
                continue
            send, sent = buffer.popleft()
            _, receive, posted = destination.posted.popleft()
            value = Action(channel.payload, send.stage, send.microbatch, send.segment)
            consumer = Action(channel.payload, receive.stage, receive.microbatch, receive.segment)
            if message_needed(consumer, self.shape) != value:
                raise HangError(f"{receive} meets {send} on {channel}\n{self._where()}")
            destination.free = max(sent, posted, destination.free)
            self.arrived[channel.destination][outcome(value)] = destination.free
            changed.add(channel.destination)
            self.touched += [(channel.source, shared), (channel.destination, shared)]
        return sorted(changed)

    @staticmethod
    def _in_front(queue: _Queue | None, channel: Channel, kinds: tuple[Kind, ...]) -> bool:
        if queue is None or not queue.posted:
            return False
        front, action, _ = queue.posted[0]
        return front == channel and action.kind in kinds

    def _where(self) -> str:
        at = [[*actions, "its end"][index] for actions, index in zip(self.lowered.ranks, self.index, strict=True)]
        lines = [f"rank {rank} waits at {action}" for rank, action in enumerate(at)]
        return "\n".join([*lines, *(f"{key}: {queue.posted}" for key, queue in self.queues.items() if queue.posted)])
