"""When the ranks of a schedule end, for many costs: a search asks that for thousands of set-ups with one schedule.

Tested in planner/test_search.py by test_ranks_end_as_in_the_simulation.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..costs.pair_times import PairTimes
from ..schedule import COMPUTE_KINDS, Action, Clock, Costs, Kind, Shape, clock_of
from ..schedule.cost_tables import Table
from .first_backward import backwards_like_the_first
from .order_table import GIVES_INPUT_GRADIENT, Marks, Numbers, OrderTable, order_table

_KINDS = (*COMPUTE_KINDS, *(kind for kind in Kind if kind.facts.is_send))  # those with times
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}
_SEND_OF = {kind.facts.payload: kind for kind in _KINDS if kind.facts.is_send}


type _Times = NDArray[np.float64]


class Columns(NamedTuple):
    """Where tables of costs have the units of micro-batches that differ: the first column of each micro-batch, and the
    number of columns."""

    first: Sequence[int]
    number: int

    def in_columns(self, actions: Iterable[Action]) -> Iterator[Action]:
        """The actions with the numbers of columns as segments."""
        for kind, stage, microbatch, segment in actions:
            yield Action(kind, stage, microbatch, self.first[microbatch] + segment)


class CopyTimes(NamedTuple):
    """Copies to the host and back that hold up the first rank. Seconds: from the start of the step until enough has
    left for each of some backwards; from the end of the last of these until all is back."""

    leaving: tuple[float, ...]
    returning: float


class _Messages(NamedTuple):
    """What actions wait for on other ranks: the actions that do, those that send, and the places of the times."""

    receivers: Numbers
    senders: Numbers
    times: Numbers


class _Pairs(NamedTuple):
    """The different pairs of a schedule, as actions of micro-batch 0, with the places of the times of both, and for
    each pair of the schedule the number of the one that it equals."""

    actions: list[tuple[Action, Action]]
    forwards: Numbers
    backwards: Numbers
    numbers: Numbers


class RankEnds:
    """The compute of all ranks as steps, each after all that it waits for, so that one pass gives their ends for any
    costs. A step starts when the step before it on its rank has ended and its message has arrived; messages overlap
    with compute and with each other, as in `simulate`."""

    def __init__(self, clock: Clock, columns: Columns | None = None, waiting: Sequence[int] = ()) -> None:
        """Costs have a column for each segment, unless `columns` says which units share one. The backwards of the first
        rank with the numbers `waiting` may wait for copies."""
        shape = clock.shape
        self._shape = shape
        self._num_columns = columns.number if columns else shape.num_segments
        table = order_table(clock)
        actions = table.of_all_ranks()
        column = _columns_of_units(shape, columns)[actions.unit]
        opens = table.opens_pair().ravel() & clock.has_pairs
        closes = np.roll(opens, 1)

        # An action is one step. A pair starts when both have their messages, so the forward's step takes no time, and
        # the backward's that of both.
        num_steps = np.ones(len(actions.kind), int)
        # A backward that waits for copies has a step of no time before. It waits as for a message of step 0.
        waits = np.flatnonzero(GIVES_INPUT_GRADIENT[table.kind[0]])[list(waiting)]
        num_steps[waits] += 1
        last = np.cumsum(num_steps) - 1
        first = last - num_steps + 1
        copying = first[waits]
        first[waits] += 1
        last[opens] = last[closes]
        work = self._places(actions.kind, actions.stage, column)
        self._pairs = self._find_pairs(actions, column, opens, closes)
        work[closes] = self._num_times + self._pairs.numbers
        works = np.zeros(num_steps.sum(), int)
        works[first] = np.where(opens, 0, work)

        # Steps count from 1 in the order of ticks; 0 is none, which ends at 0.
        in_order = np.argsort(np.repeat(actions.tick - closes, num_steps), kind="stable")
        number = np.zeros(len(in_order), int)
        number[in_order] = np.arange(1, len(in_order) + 1)
        before = np.roll(number, 1)
        before[first.reshape(table.kind.shape)[:, 0]] = 0
        self._last = number[last.reshape(table.kind.shape)[:, -1]].tolist()
        self._waiting = number[last[waits]].tolist()

        messages = self._messages(actions, column)
        senders = np.zeros(len(in_order), int)
        senders[first[messages.receivers]] = number[last[messages.senders]]
        message_times = np.zeros(len(in_order), int)
        message_times[first[messages.receivers]] = messages.times
        message_times[copying] = self._num_times + len(self._pairs.actions) + np.arange(len(waits))

        # For each step the step before it on its rank, the one that sends its message, and the places of the times of
        # the message and of the step itself in `_times`.
        self._before = before[in_order].astype(np.int32)
        self._sender = senders[in_order].astype(np.int32)
        self._message = message_times[in_order].astype(np.int32)
        self._work = works[in_order].astype(np.int32)

    def by(self, costs: Costs, pairs: PairTimes | None = None, copies: CopyTimes | None = None) -> list[float]:
        """The end of each rank, in the unit of the costs. Pairs take as long as one after the other, less what they
        save by `pairs`."""
        of_actions = _times(costs)
        of_pairs = of_actions[self._pairs.forwards] + of_actions[self._pairs.backwards]
        if pairs:
            of_pairs -= [pairs.saved(*pair) for pair in self._pairs.actions]
        leaving = copies.leaving if copies else [0.0] * len(self._waiting)
        times = np.concatenate([of_actions, of_pairs, leaving])
        ends = [0.0]
        steps = zip(
            self._before.tolist(),
            self._sender.tolist(),
            times[self._message].tolist(),
            times[self._work].tolist(),
            strict=True,
        )
        for before, sender, message, work in steps:
            start = ends[before]
            arrival = ends[sender] + message
            ends.append((arrival if arrival > start else start) + work)
        of_ranks = [ends[step] for step in self._last]
        if copies:
            of_ranks[0] = max(of_ranks[0], ends[self._waiting[-1]] + copies.returning)
        return of_ranks

    def _places(self, kind: Numbers | int, stage: Numbers, column: Numbers) -> Numbers:
        """Where `_times` has the times of kinds."""
        return 1 + (kind * self._shape.num_stages + stage) * self._num_columns + column

    @property
    def _num_times(self) -> int:
        """The length of `_times`."""
        return 1 + len(_KINDS) * self._shape.num_stages * self._num_columns

    def _find_pairs(self, actions: OrderTable, column: Numbers, opens: Marks, closes: Marks) -> _Pairs:
        """The pairs of a schedule."""
        ends = np.stack(
            [actions.kind[closes], actions.stage[opens], column[opens], actions.stage[closes], column[closes]]
        )
        different, numbers = np.unique(ends, axis=1, return_inverse=True)
        kind_b, stage_f, column_f, stage_b, column_b = different
        pairs = [
            (Action(Kind.F, forward_stage, 0, forward_column), Action(Kind.B, backward_stage, 0, backward_column))
            for _, forward_stage, forward_column, backward_stage, backward_column in different.T.tolist()
        ]
        return _Pairs(
            pairs,
            forwards=self._places(_NUMBER_OF[Kind.F], stage_f, column_f),
            backwards=self._places(kind_b, stage_b, column_b),
            numbers=numbers,
        )

    def _messages(self, actions: OrderTable, column: Numbers) -> _Messages:
        """All messages between ranks."""
        shape = self._shape
        rank_of = np.array([shape.placement.rank_of(stage) for stage in range(shape.num_stages)])
        found = []
        for kind in COMPUTE_KINDS:
            if kind.facts.receives is None:
                continue
            payload = kind.facts.receives.facts.payload
            made_by = self._made_by(actions, payload)
            receivers = actions.of_kind(kind)
            sending = actions.stage[receivers] + kind.facts.receives.facts.hop
            is_inside = (sending >= 0) & (sending < shape.num_stages)
            receivers = receivers[is_inside]
            sending = sending[is_inside]
            is_elsewhere = rank_of[sending] != rank_of[actions.stage[receivers]]
            receivers = receivers[is_elsewhere]
            sending = sending[is_elsewhere]
            times = self._places(_NUMBER_OF[_SEND_OF[payload]], sending, column[receivers])
            found.append(_Messages(receivers, made_by[sending, actions.unit[receivers]], times))
        return _Messages(*map(np.concatenate, zip(*found, strict=True)))

    def _made_by(self, actions: OrderTable, payload: Kind | None) -> Numbers:
        """The actions that make a payload, by stage and unit."""
        made_by = np.zeros((self._shape.num_stages, self._shape.num_units), int)
        for kind in COMPUTE_KINDS:
            if kind.facts.outcome is payload:
                makers = actions.of_kind(kind)
                made_by[actions.stage[makers], actions.unit[makers]] = makers
        return made_by


def _columns_of_units(shape: Shape, columns: Columns | None) -> Numbers:
    """For each unit its column in tables of costs."""
    first = columns.first if columns else [0] * shape.num_microbatches
    return np.array([first[microbatch] + segment for microbatch, segment in shape.units])


def _times(costs: Costs) -> _Times:
    """The times of all kinds, stages and segments, behind that of nothing."""
    times = [np.zeros(1)]
    for kind in _KINDS:
        times.append(np.sum([_in_one_row(table) for table in costs.tables(kind)], axis=0))
    return np.concatenate(times)


def _in_one_row(table: Table) -> _Times:
    """The rows of a table behind each other. Equal stages share a row, which is converted once."""
    rows: dict[int, _Times] = {}
    for row in table:
        if id(row) not in rows:
            rows[id(row)] = np.array(row, float)
    return np.concatenate([rows[id(row)] for row in table])


@lru_cache(maxsize=4096)
def rank_ends(family: str, shape: Shape, has_pairs: bool) -> RankEnds:
    """The steps of a named schedule. In 1F1B all backwards that are like the first may wait for copies."""
    waiting = backwards_like_the_first(shape, has_pairs) if family == "1f1b" else ()
    return RankEnds(clock_of(family, shape, has_pairs), waiting=waiting)
