"""A schedule on ranks that wait for every message: Megatron's own way without --overlap-p2p-communication.

What a rank sends and receives between two of its actions is one batch: it starts when both ends of a message have come
to theirs, and the rank goes on when all its messages are through (megatron.core, p2p_communication, batched
send-receive). With several model chunks a forward and the backward that follows it share one batch, as in the steady
state of Megatron's interleaved schedule. A W runs while the messages before it travel; those behind it are received
after it.
"""

from collections.abc import Iterator

from megatron.seq1f1b.schedule import Action, Costs, Kind, Schedule, Shape, Span, Timeline
from megatron.seq1f1b.schedule.dependencies import message_needed

_NEVER = -1.0


def execute_blocking(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of the compute actions; `costs` holds how long a message takes. Raises ValueError.

    With several model chunks and no more micro-batches than ranks, all ranks run their forwards before their backwards,
    as Megatron's interleaved schedule does.
    """
    costs.check(schedule.shape)
    shape = schedule.shape
    if shape.num_chunks > 1 and shape.num_microbatches <= shape.num_ranks:
        forwards_first = (
            tuple(sorted(actions, key=lambda action: action.kind is not Kind.F)) for actions in schedule.ranks
        )
        schedule = Schedule(shape, tuple(forwards_first))
    return _Machine(schedule, costs).run()


class _Messages:
    """Numbers for messages: `received[kind][stage]` and `sent[kind][stage]` are that of unit 0, or None.

    The message of unit n has a number higher by n.
    """

    def __init__(self, shape: Shape, costs: Costs) -> None:
        self.units = shape.num_units
        self.segments = shape.num_segments
        self.count = 2 * shape.num_stages * self.units
        self.received: dict[Kind, list[int | None]] = {}
        self.sent: dict[Kind, list[int | None]] = {}
        self.times: dict[Kind, tuple[tuple[float, ...], ...]] = {}
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            step = 1 if kind is Kind.F else -1
            self.received[kind] = [self._received(kind, stage, shape) for stage in range(shape.num_stages)]
            self.sent[kind] = [self._sent(kind, stage, step, shape) for stage in range(shape.num_stages)]
            self.times[kind] = costs.message_f if kind is Kind.F else costs.message_b

    def _number(self, kind: Kind, stage: int) -> int:
        return (2 * stage + (kind is not Kind.F)) * self.units

    def _received(self, kind: Kind, stage: int, shape: Shape) -> int | None:
        needed = message_needed(Action(kind, stage, 0, 0), shape)
        return None if needed is None or kind is Kind.W else self._number(needed.kind, needed.stage)

    def _sent(self, kind: Kind, stage: int, step: int, shape: Shape) -> int | None:
        there = stage + step
        rank_of = shape.placement.rank_of
        if kind is Kind.W or not 0 <= there < shape.num_stages or rank_of(there) == rank_of(stage):
            return None
        return self._number(kind, stage)


class _Machine:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.messages = _Messages(schedule.shape, costs)
        self.spans: list[list[Span]] = [[] for _ in schedule.ranks]
        # When the batch of the sender, and that of the receiver, was reached.
        self.posted = [[_NEVER] * self.messages.count, [_NEVER] * self.messages.count]
        self.waiting: dict[tuple[int, int], int] = {}  # side and message that a rank cannot go on without -> the rank
        self.runnable = list(range(len(schedule.ranks)))

    def run(self) -> Timeline:
        ranks = [self._advance(rank) for rank in self.runnable]
        while self.runnable:
            rank = self.runnable.pop()
            needed = next(ranks[rank], None)
            if needed is not None:
                self.waiting[needed] = rank
        if any(len(done) < len(all_) for done, all_ in zip(self.spans, self.schedule.ranks, strict=True)):
            raise ValueError("ranks that wait for every message cannot run this schedule to its end")
        return Timeline(self.schedule.shape, tuple(map(tuple, self.spans)), "s")

    def _advance(self, rank: int) -> Iterator[tuple[int, int]]:
        """Runs a rank; yields the side of a message without which it cannot go on."""
        posted = self.posted
        waiting = self.waiting
        runnable = self.runnable
        now = 0.0
        for weights, batch, actions in self._batches(rank):
            reached = now
            now = self._run(rank, weights, now)
            for side, message, _ in batch:
                posted[side][message] = now if side else reached
                if (side, message) in waiting:
                    runnable.append(waiting.pop((side, message)))
            done = now
            for side, message, time in batch:
                here = posted[side]
                there = posted[1 - side]
                while there[message] < 0:
                    yield 1 - side, message
                done = max(done, max(here[message], there[message]) + time)
            now = self._run(rank, actions, done)

    def _run(self, rank: int, actions: list[Action], now: float) -> float:
        """The end of the last of them."""
        for action in actions:
            end = now + self.costs.duration(action.kind, action.stage, action.segment)
            self.spans[rank].append(Span(action, now, end))
            now = end
        return now

    def _batches(self, rank: int) -> Iterator[tuple[list[Action], list[tuple[int, int, float]], list[Action]]]:
        """A batch of messages, and actions that run after it without another; before it, every W in between.

        A batch holds side (0 sends, 1 receives), message and how long it takes.
        """
        received = self.messages.received
        sent = self.messages.sent
        times = self.messages.times
        segments = self.messages.segments
        batch: list[tuple[int, int, float]] = []
        actions = self.schedule.ranks[rank]
        for weights, group in _groups(
            actions, paired=self.schedule.shape.num_chunks > 1 and _has_steady_state(actions)
        ):
            for kind, stage, microbatch, segment in group:
                first = received[kind][stage]
                if first is not None:
                    source = stage - 1 if kind is Kind.F else stage + 1
                    batch.append((1, first + microbatch * segments + segment, times[kind][source][segment]))
            yield weights, batch, group
            batch = []
            for kind, stage, microbatch, segment in group:
                first = sent[kind][stage]
                if first is not None:
                    batch.append((0, first + microbatch * segments + segment, times[kind][stage][segment]))


def _has_steady_state(actions: tuple[Action, ...]) -> bool:
    """Whether a forward comes after a backward."""
    kinds = [action.kind for action in actions]
    return Kind.B in kinds and Kind.F in kinds[kinds.index(Kind.B) :]


def _groups(actions: tuple[Action, ...], paired: bool) -> Iterator[tuple[list[Action], list[Action]]]:
    """Every W up to the next exchange, and what follows it: an action, or with `paired` a forward with the backward
    behind it. The last group has no action."""
    index = 0
    while index <= len(actions):
        first = index
        while index < len(actions) and actions[index].kind is Kind.W:
            index += 1
        weights = list(actions[first:index])
        group = list(actions[index : index + 1])
        index += 1
        if paired and group and group[0].kind is Kind.F and index < len(actions) and actions[index].kind is Kind.B:
            group.append(actions[index])
            index += 1
        yield weights, group
