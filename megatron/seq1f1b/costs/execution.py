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


class _Aside:
    """What runs beside the compute of a rank: collectives and copies, one after the other in each lane. `seconds` are
    by kind, stage and segment; kinds that are not in it take no time."""

    def __init__(self, seconds: Mapping[Kind, Table]) -> None:
        self.seconds = seconds
        self.lanes = dict.fromkeys(Lane, 0.0)  # the end of each
        self.parameters: dict[int, float] = {}  # the times at which those of a stage are complete
        self.copied: dict[Unit, float] = {}  # the ends of the last copies of units

    def run(self, action: Action, now: float) -> Span:
        """The span of an action that is issued now."""
        span = self._occupy(action, now, 1.0)
        if action.kind is Kind.GATHER:
            self.parameters[action.stage] = span.end
        elif not action.kind.facts.is_of_chunk:
            self.copied[action.unit] = span.end
        return span

    def _occupy(self, action: Action, now: float, share: float) -> Span:
        """The span of this share of an action, in its lane."""
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
        """When actions that run `together` end, if by themselves they end at `end`."""
        return end


class _AsideByLayer(_Aside):
    """Collectives, and copies of units that move layer by layer: all but the last layers to leave have left when a
    forward ends, and all but the first to come back do so within the backward."""

    def __init__(self, seconds: Mapping[Kind, Table], layers: LayersOnLink, actions: Iterable[Action]) -> None:
        super().__init__(seconds)
        self._layers = layers
        self._away = {action.unit for action in actions if action.kind is Kind.OFFLOAD}
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
            if action.unit in self._away:
                share = self._layers.share(action)
                if action.kind is Kind.F:
                    latest = max(latest, self._left(action, share, start, end))
                elif action.kind.facts.gives_input_gradient:
                    latest = max(latest, self._came_back(action, share, start, end))
        return latest

    def _left(self, action: Action, share: float, start: float, end: float) -> float:
        """When so much of a unit has left that its forward may end. A layer is this `share` of it."""
        copying = self.seconds[Kind.OFFLOAD][action.stage][action.segment]
        begins = max(start + share * (end - start), self.lanes[Lane.TO_HOST])
        left = max(begins + copying, end + share * copying)
        self.lanes[Lane.TO_HOST] = left
        self.copied[action.unit] = left
        self._leaving[action.unit] = Span(action._replace(kind=Kind.OFFLOAD), begins, left)
        return left - min(1.0, self._layers.leaving * share) * copying

    def _came_back(self, action: Action, share: float, start: float, end: float) -> float:
        """When a backward ends whose layers come back within it, all but the first."""
        lane = Lane.FROM_HOST
        copying = self.seconds[Kind.RELOAD][action.stage][action.segment]
        self.lanes[lane] = max(start, self.lanes[lane]) + (1 - share) * copying
        return self.lanes[lane] + share * (end - start) if share < 1 else end


def execute_lowered(
    lowered: Schedule,
    costs: Costs,
    aside: Mapping[Kind, Table] | None = None,
    pairs: PairTimes | None = None,
    layers: LayersOnLink | None = None,
    drawn: Mapping[Action, float] | None = None,
) -> Timeline:
    """The timeline of the compute actions, and of GATHER, REDUCE, OFFLOAD and RELOAD if `aside` has the seconds of the
    kind, by stage and segment. With `pairs` the two of a pair save time. With `layers` units move one layer after the
    other. Compute actions in `drawn` take so many seconds instead of their costs. Raises ValueError if the costs do not
    fit, or if the schedule cannot run to its end."""
    costs.check(lowered.shape)
    return _Execution(lowered, costs, aside or {}, pairs, layers, drawn or {}).timeline()


class _Execution:
    """Ranks run by the events of all in the order of their times, since messages that leave a rank share its port."""

    def __init__(
        self,
        lowered: Schedule,
        costs: Costs,
        aside: Mapping[Kind, Table],
        pairs: PairTimes | None,
        layers: LayersOnLink | None,
        drawn: Mapping[Action, float],
    ) -> None:
        self.lowered = lowered
        self.layers = layers
        self.drawn = drawn
        self.tables = {kind: costs.tables(kind) for kind in Kind}
        self.aside = aside
        self.pairs = pairs
        self.events: list[Event] = [(0.0, rank, 0) for rank in range(len(lowered.ranks))]  # a heap
        self.ports = [Port(rank, self.events) for rank in range(len(lowered.ranks))]
        self.queues = _queues(lowered.shape.placement, self.ports)

    def timeline(self) -> Timeline:
        """Runs all ranks to their ends."""
        spans: list[list[Span]] = [[] for _ in self.ports]
        ranks = [self._run(rank, spans[rank]) for rank in range(len(spans))]
        left = set(range(len(spans)))
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
                rank, queue.waiting = queue.waiting, None
            try:
                next(ranks[rank])
            except StopIteration:
                left.remove(rank)
        if left:
            raise ValueError("the schedule cannot run to its end; validate it to see why")
        # GATHER and REDUCE may start after compute that they were put before.
        in_order = (tuple(sorted(of_rank, key=lambda span: span.start)) for of_rank in spans)
        return Timeline(self.lowered.shape, tuple(in_order), "s")

    def _run(self, rank: int, spans: list[Span]) -> Iterator[None]:
        """Runs a rank. It stops where it waits for a message, and before a send or a receive if there is an earlier
        event."""
        events = self.events
        queues = self.queues
        tables = self.tables
        pairs = self.pairs
        drawn = self.drawn
        paired = self.lowered.paired
        beside = _Aside(self.aside)
        if self.layers is not None:
            beside = _AsideByLayer(self.aside, self.layers, self.lowered.ranks[rank])
        now = 0.0
        together: list[Action] = []  # the forward of a pair that has not begun
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
                if self.aside:
                    now = max(now, beside.ready(action))
                if action in paired:
                    together = [action]
                    continue
                together.append(action)
                seconds = 0.0
                for running in together:
                    if running in drawn:
                        seconds += drawn[running]
                        continue
                    for table in tables[running.kind]:
                        seconds += table[running.stage][running.segment]
                end = now + seconds
                if pairs is not None and len(together) == 2:
                    end = max(now, end - pairs.saved(*together))
                if self.aside:
                    end = beside.end(together, now, end)
                spans += [Span(running, now, end) for running in together]
                together = []
                now = end
            elif kind in self.aside:
                span = beside.run(action, now)
                spans.append(span)
                if kind is Kind.OFFLOAD:  # waits for the one before it
                    now = max(now, span.start)
            elif (kind, stage) in queues:
                if events and events[0][0] < now:
                    heappush(events, (now, rank, 0))
                    yield
                queue = queues[kind, stage]
                if facts.is_send:
                    (table,) = tables[kind]
                    queue.send(now, table[stage][segment])
                else:
                    queue.post(now)


def _queues(placement: Placement, ports: Sequence[Port]) -> dict[tuple[Kind, int], MessageQueue]:
    """The channels between all ranks, each by the kinds of its messages and their stages at both ends."""
    by_channel: dict[Channel, MessageQueue] = {}
    by_message = {}
    for rank in range(placement.num_ranks):
        for key, channel in channels_of(placement, rank).items():
            by_message[key] = by_channel.setdefault(channel, MessageQueue(ports[channel.source]))
    return by_message
