"""What waits in a search: configurations that are alike in all that is decided so far, from parallel sizes alone to one
that is cut.

Tested in planner/test_search.py by test_what_the_bounds_leave_out_is_no_answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..costs.training_setup import TrainingSetup
from .space import Candidate


class Sizes(NamedTuple):
    """Parallel sizes, for all recomputations, and ascending numbers of segments, whose bound is that of the first."""

    setup: TrainingSetup
    segments: tuple[int, ...]


class Open(NamedTuple):
    """Set-ups that differ in what they compute again, and in whether they keep logits or graphs replay layers. Their
    layers are not spread over stages yet, and they have no family; it `splits` backwards, or does not."""

    setups: tuple[TrainingSetup, ...]
    segments: int
    splits: bool


class OfChunks(NamedTuple):
    """Those of `sizes` that have so many chunks a rank."""

    sizes: Open
    chunks: int


class InChunks(NamedTuple):
    """Set-ups that differ in what they compute again alone, with layers spread over stages, each with the families that
    it may have."""

    families_of: Mapping[TrainingSetup, Sequence[str]]
    segments: int


class Spread(NamedTuple):
    """Set-ups that differ in what they compute again alone, each with its seconds for copies at least. They have a
    family, and are not cut yet."""

    away: Mapping[TrainingSetup, float]
    segments: int


class Cuts(NamedTuple):
    """The cuts of a set-up, the fastest first, of which the memory is not known yet. Their copies take `away` seconds
    at least: more than 0 if none fits with all of its activations on the device."""

    ranked: tuple[Candidate, ...]
    away: float


class AlikeCuts(NamedTuple):
    """The cuts of set-ups that differ in what they compute again alone. `fastest` are those of them that compute
    nothing again, whether or not they are among these. `unevenness` is that of the one with the most even segments."""

    fastest: tuple[TrainingSetup, ...]
    of_setups: tuple[Cuts, ...]
    unevenness: float


class TooLarge(NamedTuple):
    """Cuts, the fastest first, that do not fit, but may with activations on the host."""

    ranked: tuple[Candidate, ...]


class Timed(NamedTuple):
    """An item whose bound has its schedule in time."""

    item: AlikeCuts | TooLarge | Candidate


class OfUnits(NamedTuple):
    """An item of the search for units of one size, the one of this number."""

    number: int
    item: Any
