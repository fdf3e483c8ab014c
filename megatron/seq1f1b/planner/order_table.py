"""The orders of all ranks of a clock as columns of numbers, which take a tenth of the time that actions take.

Tested in planner/test_search.py by test_a_table_has_the_orders_of_a_clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schedule import COMPUTE_KINDS, Clock, Kind, Shape

type Numbers = NDArray[np.int64]
type Marks = NDArray[np.bool_]

KIND_NUMBER = {kind: number for number, kind in enumerate(COMPUTE_KINDS)}
GIVES_INPUT_GRADIENT = np.array([kind.facts.gives_input_gradient for kind in COMPUTE_KINDS])


class OrderTable(NamedTuple):
    """The compute actions of ranks. Columns have a row for each rank, and in it a number for each action in the order
    of the rank; all ranks have equally many."""

    kind: Numbers  # in COMPUTE_KINDS
    stage: Numbers
    unit: Numbers  # in the order of forwards, as in `Shape.units`
    tick: Numbers

    def opens_pair(self) -> Marks:
        """Which of them are forwards with the tick before that of the backward after them."""
        is_forward = self.kind[:, :-1] == KIND_NUMBER[Kind.F]
        is_next_backward = GIVES_INPUT_GRADIENT[self.kind[:, 1:]]
        is_next_tick = self.tick[:, 1:] == self.tick[:, :-1] + 1
        marks = np.zeros(self.kind.shape, bool)
        marks[:, :-1] = is_forward & is_next_backward & is_next_tick
        return marks

    def of_all_ranks(self) -> "OrderTable":
        """The actions of all ranks in one row."""
        return OrderTable(*(column.ravel() for column in self))

    def of_kind(self, kind: Kind) -> Numbers:
        """The places of the actions of a kind, in a table of one row."""
        return np.flatnonzero(self.kind == KIND_NUMBER[kind])

    def taken(self, places: Numbers) -> "OrderTable":
        """The actions at these places of each rank."""
        return OrderTable(*(np.take_along_axis(column, places, axis=1) for column in self))


def order_table(clock: Clock) -> OrderTable:
    """The orders of `clock.schedule()`."""
    shape = clock.shape
    units = range(shape.num_units)
    # Of each stage its forwards, and behind them its backwards.
    forward_ticks = np.array([[clock.tick(unit, stage) for unit in units] for stage in range(shape.num_stages)])
    backward_ticks = clock.turn + forward_ticks[::-1]
    ticks = np.concatenate([forward_ticks, backward_ticks], axis=1)
    unit = np.concatenate([np.arange(shape.num_units), _units_backward(shape)])
    backward = Kind.B if clock.lag is None else Kind.I
    kind = np.repeat([KIND_NUMBER[Kind.F], KIND_NUMBER[backward]], shape.num_units)
    # Of each rank its stages, one behind the other.
    stages = np.array([shape.placement.stages_of(rank) for rank in range(shape.num_ranks)])
    unsorted = OrderTable(
        kind=np.tile(kind, (shape.num_ranks, shape.num_chunks)),
        stage=np.repeat(stages, len(unit), axis=1),
        unit=np.tile(unit, (shape.num_ranks, shape.num_chunks)),
        tick=ticks[stages].reshape(shape.num_ranks, -1),
    )
    in_order = unsorted.taken(np.argsort(unsorted.tick, axis=1, kind="stable"))
    if clock.lag is None:
        return in_order
    return _with_weight_gradients(in_order, [clock.lag(rank) for rank in range(shape.num_ranks)])


def _units_backward(shape: Shape) -> Numbers:
    """The units in the order of backwards."""
    return np.array([shape.first_units[microbatch] + segment for microbatch, segment in shape.units_backward])


def _with_weight_gradients(table: OrderTable, lags: Sequence[int]) -> OrderTable:
    """The table with the W of each I: on each rank directly behind the I that comes `lag` later, or the last one."""
    num_ranks, num_actions = table.kind.shape
    place_of_input = np.nonzero(table.kind == KIND_NUMBER[Kind.I])[1].reshape(num_ranks, -1)
    number = np.arange(place_of_input.shape[1])
    following = np.minimum(number + np.array(lags)[:, None], number[-1])
    behind = np.take_along_axis(place_of_input, following, axis=1)
    inputs = table.taken(place_of_input)
    weights = inputs._replace(
        kind=np.full_like(inputs.kind, KIND_NUMBER[Kind.W]), tick=np.take_along_axis(table.tick, behind, axis=1)
    )
    both = OrderTable(*(np.concatenate(columns, axis=1) for columns in zip(table, weights, strict=True)))
    places = np.tile(np.arange(num_actions), (num_ranks, 1))
    return both.taken(np.argsort(np.concatenate([places, behind], axis=1), axis=1, kind="stable"))
