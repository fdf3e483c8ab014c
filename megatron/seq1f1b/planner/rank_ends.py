"""When the ranks of a schedule end, for many costs: a search asks that for thousands of set-ups with one schedule.

Tested in planner/test_search.py by test_ranks_end_as_in_the_simulation.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from ..costs.pair_times import PairTimes
from ..schedule import COMPUTE_KINDS, Action, Clock, Costs, Kind, Shape, clock_of
from ..schedule.schedule import Place

_SENDS = tuple(kind for kind in Kind if kind.facts.is_send)
_SEND_OF = {kind.facts.payload: kind for kind in _SENDS}
_KINDS = (*COMPUTE_KINDS, *_SENDS)  # those with times
_ROW_OF = {kind: row for row, kind in enumerate(_KINDS)}
# The last step of each forward and of each backward, by its outcome, stage, micro-batch and segment.
type _Makers = dict[tuple[Kind | None, int, int, int], int]


class Columns(NamedTuple):
    """Where tables of costs have the units of micro-batches that differ: the first column of each micro-batch, and the
    number of columns."""

    first: Sequence[int]
    number: int

    def in_columns(self, actions: Iterable[Action]) -> Iterator[Action]:
        """The actions with the numbers of columns as segments."""
        for kind, stage, microbatch, segment in actions:
            yield Action(kind, stage, microbatch, self.first[microbatch] + segment)


class RankEnds:
    """The compute of all ranks as steps, each after all that it waits for, so that one pass gives their ends for any
    costs. A step starts when the step before it on its rank has ended and its message has arrived; messages overlap
    with compute and with each other, as in `simulate`."""

    def __init__(self, clock: Clock, columns: Columns | None = None) -> None:
        """Without `columns` costs have one for each segment."""
        self._shape = clock.shape
        self._num_columns = columns.number if columns else clock.shape.num_segments
        # For each step the numbers of the step before it and of the step that sends its message, and the places of the
        # message and of the step itself among the times of all kinds and pairs. 0 stands for none, which ends at 0.
        self._before = array("i", [0])
        self._sender = array("i", [0])
        self._message = array("i", [0])
        self._work = array("i", [0])
        self._last = [0] * clock.shape.num_ranks  # the last step of each rank
        self._pairs: dict[tuple[Action, Action], int] = {}  # the places of what they save
        made_by: _Makers = {}
        for rank, in_segments in _in_order(clock):
            place = tuple(columns.in_columns(in_segments)) if columns else in_segments
            if len(place) == 1:
                (action,) = place
                self._append(rank, self._message_of(action, made_by), self._work_of(action))
            else:
                forward, backward = place
                self._append_pair(rank, forward, backward, made_by)
            for action in place:
                made_by[action.kind.facts.outcome, *action.unit] = self._last[rank]

    def by(self, costs: Costs, pairs: PairTimes | None = None) -> list[float]:
        """The end of each rank, in the unit of the costs. Pairs take as long as one after the other, less what they
        save by `pairs`."""
        times = _times(costs)
        times += [-pairs.saved(*pair) if pairs else 0.0 for pair in self._pairs]
        ends = [0.0] * len(self._work)
        steps = zip(self._before, self._sender, self._message, self._work, strict=True)
        for step, (before, sender, message, work) in enumerate(steps):
            start = ends[before]
            arrival = ends[sender] + times[message]
            ends[step] = (arrival if arrival > start else start) + times[work]
        return [ends[step] for step in self._last]

    def _append_pair(self, rank: int, forward: Action, backward: Action, made_by: _Makers) -> None:
        """Adds the steps of a pair, which starts when both have their messages, and saves time at its end."""
        self._append(rank, self._message_of(forward, made_by), work=0)
        self._append(rank, self._message_of(backward, made_by), self._work_of(forward))
        self._append(rank, (0, 0), self._work_of(backward))
        of_any_microbatch = forward._replace(microbatch=0), backward._replace(microbatch=0)
        saved = self._pairs.setdefault(of_any_microbatch, self._num_times + len(self._pairs))
        self._append(rank, (0, 0), saved)

    def _append(self, rank: int, message: tuple[int, int], work: int) -> None:
        """Adds the next step of a rank, with the sender and the time of its message and the time of its work."""
        self._before.append(self._last[rank])
        self._sender.append(message[0])
        self._message.append(message[1])
        self._work.append(work)
        self._last[rank] = len(self._work) - 1

    def _message_of(self, action: Action, made_by: _Makers) -> tuple[int, int]:
        """The step on another rank that sends an action its message, and where the time of that message is."""
        receives = action.kind.facts.receives
        if receives is None or receives.facts.payload is None:
            return 0, 0
        stage = action.stage + receives.facts.hop
        rank_of = self._shape.placement.rank_of
        if not 0 <= stage < self._shape.num_stages or rank_of(stage) == rank_of(action.stage):
            return 0, 0
        payload = receives.facts.payload
        sender = made_by[payload, stage, action.microbatch, action.segment]
        return sender, self._time_of(_SEND_OF[payload], stage, action.segment)

    def _work_of(self, action: Action) -> int:
        """Where `_times` has the time of a compute action."""
        return self._time_of(action.kind, action.stage, action.segment)

    def _time_of(self, kind: Kind, stage: int, segment: int) -> int:
        """Where `_times` has the time of a kind."""
        return 1 + (_ROW_OF[kind] * self._shape.num_stages + stage) * self._num_columns + segment

    @property
    def _num_times(self) -> int:
        """The length of `_times`."""
        return 1 + len(_KINDS) * self._shape.num_stages * self._num_columns


def _in_order(clock: Clock) -> list[tuple[int, Place]]:
    """What runs, each with its rank, after all that it needs: in the order of ticks."""
    schedule = clock.schedule()
    found = []
    for rank, order in enumerate(schedule.ranks):
        tick_of = dict(zip(order, clock.ticks(order), strict=True))
        found += [(tick_of[place[0]], rank, number, place) for number, place in enumerate(schedule.places(rank))]
    found.sort(key=itemgetter(0, 1, 2))
    return [(rank, place) for _, rank, _, place in found]


def _times(costs: Costs) -> list[float]:
    """The times of all kinds, stages and segments, behind that of nothing."""
    times = [0.0]
    for kind in _KINDS:
        of_tables = [list(chain.from_iterable(table)) for table in costs.tables(kind)]
        times += map(sum, zip(*of_tables, strict=True))
    return times


@lru_cache(maxsize=4096)
def rank_ends(family: str, shape: Shape, has_pairs: bool) -> RankEnds:
    """Those of a named schedule."""
    return RankEnds(clock_of(family, shape, has_pairs))
