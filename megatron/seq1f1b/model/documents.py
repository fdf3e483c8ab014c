"""The documents of packed sequences, and what a segment has of them."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

# For each sequence of a micro-batch the positions of the tokens that documents start with, in order, the first of
# them 0.
Documents = tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """What a segment has of one document: its tokens `start` to `end`, which see the keys from `first_key` on.

    All are positions in the sequence. The pieces of a segment follow one another without a gap; only the first can
    begin later than its document.
    """

    first_key: int
    start: int
    end: int


def pieces(starts: Sequence[int], start: int, end: int) -> list[Piece]:
    """The documents of one sequence, which begin at `starts`, in the segment of its tokens `start` to `end`."""
    first = bisect_right(starts, start) - 1
    last = bisect_right(starts, end - 1)
    bounds = [starts[first], *starts[first + 1 : last], end]
    return [Piece(first_key, max(first_key, start), stop) for first_key, stop in pairwise(bounds)]


def from_token(first: int, documents: Documents) -> Documents:
    """The documents of sequences without the tokens before `first`; one that has begun by then begins at 0."""
    if first == 0:
        return documents
    return tuple((0, *(start - first for start in starts if start > first)) for starts in documents)
