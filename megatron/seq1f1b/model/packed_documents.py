"""Documents that share a sequence, and the pieces that a segment has of them."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

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


def pieces(starts: Sequence[int], start: int, end: int, first_token: int = 0) -> list[Piece]:
    """The documents of one sequence, which begin at `starts`, in the segment of its tokens `start` to `end`.

    A document that has begun by `first_token`, before which no keys are seen, begins there.
    """
    first = bisect_right(starts, start) - 1
    last = bisect_right(starts, end - 1)
    bounds = [max(starts[first], first_token), *starts[first + 1 : last], end]
    return [Piece(first_key, max(first_key, start), stop) for first_key, stop in pairwise(bounds)]


class CumulativeLengths(NamedTuple):
    """Documents one after the other: where the queries and the keys of each end, and the length of the longest.

    `query_ends` and `key_ends` are int32 on the device, with a 0 in front. The queries of a document are the last of
    the tokens that its keys span.
    """

    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, found: Sequence[Piece], device: torch.device) -> "CumulativeLengths":
        queries = [piece.end - piece.start for piece in found]
        keys = [piece.end - piece.first_key for piece in found]
        ends = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(keys)]], dtype=torch.int32)
        if device.type == "cuda":  # from pinned memory the host need not wait for the copy
            ends = ends.pin_memory().to(device, non_blocking=True)
        return cls(ends[0], ends[1], max(queries), max(keys))
