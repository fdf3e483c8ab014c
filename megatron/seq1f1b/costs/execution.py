"""A lowered schedule in simulated time, in the order of the interpreter.

Sends and receives do not hold up a rank; a compute action waits for its message (`ports`). Beside compute, and one
after the other, a rank gathers and reduces chunks, and copies units to the host and back. Actions wait for the
parameters of their chunk, a backward for its unit, and an OFFLOAD for the one before it.

Tested in costs/test_simulator.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush

from ..schedule import Action, Channel, Kind, Lane, Placement, Schedule, Unit, channels_of
from ..schedule.cost_tables import Costs, Table
from ..schedule.timeline import Span, Timeline
from .host_link import LayersOnLink
from .pair_times import PairTimes
from .ports import Event, MessageQueue, Port


class _SideWork:
    """Collectives and copies beside the compute of a rank, one after the other in each lane. `seconds` are by kind,
    stage and segment; kinds that are not in it take no time."""

    def __init__(self, seconds: Mapping[Kind, Table]) -> None:
        self.seconds = seconds
        self.lanes = dict.fromkeys(Lane, 0.0)  # when a lane is free
        self.parameters: dict[int, float] = {}  # when the parameters of a stage are complete
        self.copied: dict[Unit, float] = {}  # when the last copy of a unit ends

    def run(self, action: Action, now: float) -> Span:
        """The span of an action that is issued now."""
        span = self._occupy(action, now, 1.0)
        if action.kind is Kind.GATHER:
            self.parameters[action.stage] = span.end
        elif not action.kind.facts.is_of_chunk:
            self.copied[action.unit] = span.end
        return span

    def _occupy(self, action: Action, now: float, share: float) -> Span:
        """The span of an action of which only this share is done, as soon as its lane is free."""
        kind, stage, _, segment = action
        lane = kind.facts.lane
        start = max(now, self.lanes[lane], self.copied.get(action.unit, 0.0))
        end = start + share * self.seconds[kind][stage][segment]
        self.lanes[lane] = end
        return Span(action, start, end)

    def ready(self, action: Action) -> float:
        """When a compute action has its parameters and its unit."""
        facts = action.kind.facts
        parameters = self.parameters.get(action.stage, 0.0) if facts.needs_parameters else 0.0
        copied = self.copied.pop(action.unit, 0.0) if facts.gives_input_gradient else 0.0
        return max(parameters, copied)

    def end(self, together: Sequence[Action], start: float, end: float) -> float:
        """When actions that run `together` end, if nothing holds them up beyond `end`."""
        return end


class _SideWorkByLayer(_SideWork):
    """Collectives, and copies of units that move layer by layer. When a forward ends, all but the last layers have left
    for the host; all but the first layer come back within the backward."""

    def __init__(self, seconds: Mapping[Kind, Table], layers: LayersOnLink, actions: Iterable[Action]) -> None:
        super().__init__(seconds)
        self._layers = layers
        self._moved_units = {action.unit for action in actions if action.kind is Kind.OFFLOAD}
        self._leaving: dict[Unit, Span] = {}

    def run(self, action: Action, now: float) -> Span:
        if action.kind is Kind.OFFLOAD:  # it has begun within the forward
            return self._leaving.pop(action.unit)
        if action.kind is Kind.RELOAD:  # the first layer; others follow within the backward
            span = self._occupy(action, now, self._layers.share(action))
            self.copied[action.unit] = span.end
            return span
        return super().run(action, now)

    def end(self, together: Sequence[Action], start: float, end: float) -> float:
        latest = end
        for action in together:
            if action.unit in self._moved_units:
                share = self._layers.share(action)
                if action.kind is Kind.F:
                    latest = max(latest, self._end_of_forward(action, share, start, end))
                elif action.kind.facts.gives_input_gradient:
                    latest = max(latest, self._end_of_backward(action, share, start, end))
        return latest

    def _end_of_forward(self, action: Action, share: float, start: float, end: float) -> float:
        """When a forward may end, since enough of its unit has left; a layer is this `share` of the unit."""
        copying = self.seconds[Kind.OFFLOAD][action.stage][action.segment]
        begins = max(start + share * (end - start), self.lanes[Lane.TO_HOST])
        left = max(begins + copying, end + share * copying)
        self.lanes[Lane.TO_HOST] = left
        self.copied[action.unit] = left
        self._leaving[action.unit] = Span(action._replace(kind=Kind.OFFLOAD), begins, left)
        return left - min(1.0, self._layers.leaving * share) * copying

    def _end_of_backward(self, action: Action, share: float, start: float, end: float) -> float:
        """When a backward ends, within which all layers but the first come back."""
        lane = Lane.FROM_HOST
        copying = self.seconds[Kind.RELOAD][action.stage][action.segment]
        self.lanes[lane] = max(start, self.lanes[lane]) + (1 - share) * copying
        return self.lanes[lane] + share * (end - start) if share < 1 else end


def execute_lowered(
    lowered: Schedule,
    costs: Costs,
    side_seconds: Mapping[Kind, Table] | None = None,
    pairs: PairTimes | None = None,
    layers: LayersOnLink | None = None,
    drawn: Mapping[Action, float] | None = None,
) -> Timeline:
    """The timeline of a lowered schedule, in seconds: its compute actions, and those of the kinds in `side_seconds`.

    `side_seconds` has the durations of GATHER, REDUCE, OFFLOAD and RELOAD by stage and segment; kinds that it lacks
    take no time. `pairs` says how much time the two actions of a pair save beside each other. With `layers`, units move
    to the host one layer after the other instead of as a whole. `drawn` has the durations of single compute actions, in
    place of those in `costs`. Raises ValueError if the costs do not fit the shape of the schedule, or if it cannot run
    to its end.
    """
    costs.check(lowered.shape)
    return _Execution(lowered, costs, side_seconds or {}, pairs, layers, drawn or {}).timeline()


class _Execution:
    """Runs all ranks together, event by event in the order of their times, since messages that leave a rank share its
    port."""

    def __init__(
        self,
        lowered: Schedule,
        costs: Costs,
        side_seconds: Mapping[Kind, Table],
        pairs: PairTimes | None,
        layers: LayersOnLink | None,
        drawn: Mapping[Action, float],
    ) -> None:
        self.lowered = lowered
        self.layers = layers
        self.drawn = drawn
        self.tables = {kind: costs.tables(kind) for kind in Kind}
        self.side_seconds = side_seconds
        self.pairs = pairs
        self.events: list[Event] = [(0.0, rank, 0) for rank in range(len(lowered.ranks))]  # a heap
        self.ports = [Port(rank, self.events) for rank in range(len(lowered.ranks))]
        self.queues = _queues(lowered.shape.placement, self.ports)

    def timeline(self) -> Timeline:
        """Runs all ranks to their ends."""
        spans: list[list[Span]] = [[] for _ in self.ports]
        ranks = [self._run(rank, spans[rank]) for rank in range(len(spans))]
        running = set(range(len(spans)))
        while self.events:
            time, rank, arrival = heappop(self.events)
            if arrival:
                port = self.ports[rank]
                if arrival < port.last_event:  # another message has started or arrived since
                    continue
                queue = port.leave(time)
                queue.arrive(time)
                if queue.waiting is None:
                    continue
                rank = queue.waiting
                queue.waiting = None
            try:
                next(ranks[rank])
            except StopIteration:
                running.remove(rank)
        if running:
            raise ValueError("the schedule cannot run to its end; validate it to see why")
        # GATHER and REDUCE may start after compute that they were put before.
        for of_rank in spans:
            of_rank.sort(key=lambda span: span.start)
        return Timeline(self.lowered.shape, tuple(map(tuple, spans)), "s")

    def _run(self, rank: int, spans: list[Span]) -> Iterator[None]:
        """Runs a rank. It stops where it waits for a message, and before a send or a receive if there is an earlier
        event."""
        events = self.events
        queues = self.queues
        paired = self.lowered.paired
        side_work = self._side_work_of(rank)
        now = 0.0
        together: list[Action] = []  # what starts next: an action, or both actions of a pair
        for action in self.lowered.ranks[rank]:
            kind, stage, _, segment = action
            facts = kind.facts
            if facts.lane is Lane.COMPUTE:
                if facts.receives is not None and (facts.receives, stage) in queues:
                    queue = queues[facts.receives, stage]
                    if not queue.arrived:
                        queue.waiting = rank
                        yield
                    now = max(now, queue.arrived.popleft())
                if self.side_seconds:
                    now = max(now, side_work.ready(action))
                together.append(action)
                if action in paired:
                    continue
                end = self._end(together, now, side_work)
                spans += [Span(running, now, end) for running in together]
                together = []
                now = end
            elif kind in self.side_seconds:
                span = side_work.run(action, now)
                spans.append(span)
                if kind is Kind.OFFLOAD:  # waits for the one before it
                    now = max(now, span.start)
            elif (kind, stage) in queues:
                if events and events[0][0] < now:
                    heappush(events, (now, rank, 0))
                    yield
                queue = queues[kind, stage]
                if facts.is_send:
                    (table,) = self.tables[kind]
                    queue.send(now, table[stage][segment])
                else:
                    queue.post(now)

    def _side_work_of(self, rank: int) -> _SideWork:
        if self.layers is None:
            return _SideWork(self.side_seconds)
        return _SideWorkByLayer(self.side_seconds, self.layers, self.lowered.ranks[rank])

    def _end(self, together: Sequence[Action], start: float, side_work: _SideWork) -> float:
        """The end of what a rank starts now: of an action, or of both actions of a pair."""
        seconds = 0.0
        for action in together:
            if action in self.drawn:
                seconds += self.drawn[action]
                continue
            for table in self.tables[action.kind]:
                seconds += table[action.stage][action.segment]
        end = start + seconds
        if self.pairs is not None and len(together) == 2:
            forward, backward = together
            end = max(start, end - self.pairs.saved(forward, backward))
        return side_work.end(together, start, end) if self.side_seconds else end


def _queues(placement: Placement, ports: Sequence[Port]) -> dict[tuple[Kind, int], MessageQueue]:
    """The queue of messages behind every send and receive, by its kind and stage."""
    by_channel: dict[Channel, MessageQueue] = {}
    by_message = {}
    for rank in range(placement.num_ranks):
        for key, channel in channels_of(placement, rank).items():
            by_message[key] = by_channel.setdefault(channel, MessageQueue(ports[channel.source]))
    return by_message
