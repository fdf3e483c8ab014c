"""Documents packed into a sequence, and their pieces in a segment.

Tested in model/test_cuda_kernel.py.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# For each sequence of a micro-batch, the positions where documents start, in order from 0.
Documents = tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """The tokens `start` to `end` of one document in a segment, which see the keys from `first_key` on, by position in
    the sequence. Pieces have no gaps, and only the first of a segment may begin later than its document."""

    first_key: int
    start: int
    end: int


def document_start(starts: Sequence[int], token: int, first_token: int = 0) -> int:
    """The start of a token's document, at least `first_token`; documents begin at `starts`."""
    return max(starts[bisect_right(starts, token) - 1], first_token)


def pieces(starts: Sequence[int], start: int, end: int, first_token: int = 0) -> list[Piece]:
    """The pieces of documents that begin at `starts` in the tokens `start` to `end`. Keys before `first_token` are not
    seen, so a document with an earlier start begins there."""
    inner = starts[bisect_right(starts, start) : bisect_right(starts, end - 1)]
    bounds = [document_start(starts, start, first_token), *inner, end]
    return [Piece(first_key, max(first_key, start), stop) for first_key, stop in pairwise(bounds)]


class CumulativeLengths(NamedTuple):
    """Consecutive documents: the ends of the queries and keys of each, int32 on the device with a 0 in front, and the
    most of either in a document. The queries of a document are the last tokens of its keys."""

    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, documents: Sequence[Piece], device: torch.device) -> "CumulativeLengths":
        queries = [piece.end - piece.start for piece in documents]
        keys = [piece.end - piece.first_key for piece in documents]
        ends = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(keys)]], dtype=torch.int32)
        if device.type == "cuda":  # the host does not wait for a copy from pinned memory
            ends = ends.pin_memory().to(device, non_blocking=True)
        return cls(
            query_ends=ends[0],
            key_ends=ends[1],
            most_queries=max(queries),
            most_keys=max(keys),
        )
