"""The order in which the items of a search wait.

Tested in planner/test_search.py by test_steps_beyond_a_limit_need_not_be_the_fastest.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import search_items as items
from .space import Candidate

# How many times its bound the best plan of an item takes in a pipeline: about as far off were the bounds behind which
# searches of large mixtures found their best plans.
_EXPECTED: Mapping[type, float] = {
    items.Sizes: 1.15,
    items.Open: 1.17,
    items.OfChunks: 1.12,
    items.InChunks: 1.12,
    items.Spread: 1.1,
    items.AlikeCuts: 1.05,
    items.Cuts: 1.02,
    items.TooLarge: 1.015,
    items.Timed: 1.015,
    Candidate: 1.015,
}
MOST_OVER = max(_EXPECTED.values())
# About so much of the time that the longest segment takes beyond the mean one shows in a step.
_SHOWS = 0.5


def _expected(item: Any) -> float | None:
    """How many times its bound the best plan of an item takes; None if the bound is about what it takes."""
    if isinstance(item, items.OfUnits):
        return _expected(item.item)
    if type(item) not in _EXPECTED:
        return None
    uneven = _SHOWS * (item.unevenness - 1) if isinstance(item, items.AlikeCuts) else 0.0
    return min(MOST_OVER, _EXPECTED[type(item)] * (1 + uneven))


class ItemPlace(NamedTuple):
    """Where an item waits: by the seconds of its order, then, as a plan, by the place of its family among those of the
    question. `path` decides between equal ones: by their numbers, the items from which it comes, and itself. So the
    order is the same in every search, however many processes share it."""

    seconds: float
    family: int  # -1: no plan, which comes first
    path: tuple[int, ...]


class WaitingItem(NamedTuple):
    """An item with its place, of which no two items have the same, the lower bound of its step, and whether it has a
    pipeline of several ranks."""

    place: ItemPlace
    bound: float
    has_pipeline: bool
    item: Any


class SearchOrder(NamedTuple):
    """The order in which items wait: of their bounds and, from `exact_below` seconds on, of what their best plans are
    expected to take."""

    exact_below: float

    def placed(self, waiting: WaitingItem) -> WaitingItem:
        """An item whose place is that of its bound, in this order. Without a pipeline bounds are close, and plans take
        what they take."""
        place, bound, has_pipeline, item = waiting
        if not has_pipeline or bound < self.exact_below:
            return waiting
        expected = _expected(item)
        if expected is None:
            return waiting
        return waiting._replace(place=place._replace(seconds=bound * expected))

    def least_left(self, place: ItemPlace) -> float:
        """The least that an item takes whose place is this one, or a later one."""
        if place.seconds < self.exact_below:
            return place.seconds
        return max(self.exact_below, place.seconds / MOST_OVER)
