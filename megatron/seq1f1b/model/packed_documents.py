"""Documents packed into a sequence, their pieces in a segment, and the masks that keep them apart.

Tested in runtime/test_masks.py.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEEP_APART = (
    "for packed documents give --reset-attention-mask, or mark them in the call of the model on the first stage, too"
)

_ROWS_AT_ONCE = 1024  # of a mask

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


class MaskCheck:
    """Compares masks with causal attention; only `settle` reads results of a GPU, so nothing waits before."""

    def __init__(self) -> None:
        self._doubts: list[tuple[Tensor, str]] = []

    def require_causal(self, mask: Any, length: int, where: str) -> None:
        """Raise ValueError unless a mask of sequences of `length` (s) tokens hides nothing but later tokens, booleans
        [..., s, s], or padding behind them: [b, s], True for tokens, as Hugging Face's models take it, or
        [b, 1, 1, s], True for padding, as Megatron's. `where` names it in the error; `settle` raises it for a GPU's."""
        if not isinstance(mask, Tensor) or mask.shape[-1] != length:
            return
        if mask.dim() > 2 and mask.shape[-2] == length:
            doubt = differs(mask.bool().reshape(-1, length, length))
        else:
            is_padding = ~mask.bool() if mask.dim() == 2 else mask.bool()
            doubt = (is_padding[..., :-1] & ~is_padding[..., 1:]).any()
        self._doubts.append((doubt, where))
        if not mask.is_cuda:
            self.settle()

    def settle(self) -> None:
        """Raise ValueError for a mask that is not causal; waits for the GPU if any mask was on it."""
        doubts = self._doubts
        self._doubts = []
        if doubts and torch.stack([doubt for doubt, _ in doubts]).any():
            raise ValueError(
                f"{next(where for doubt, where in doubts if doubt)} is not plain causal attention, with padding at the "
                f"end, and segments of a sequence compute nothing else; {KEEP_APART}, or drop --sequence-splits"
            )


def differs(mask: Tensor, document: Tensor | None = None) -> Tensor:
    """Whether `mask` [b, s, s], True where hidden, differs from the causal mask, or from that within documents if
    `document` [b, s] numbers them for each token: a boolean on its device."""
    is_different = torch.zeros((), dtype=torch.bool, device=mask.device)
    for first in range(0, mask.shape[-1], _ROWS_AT_ONCE):
        rows = mask[:, first : first + _ROWS_AT_ONCE]
        hidden = torch.ones(rows.shape[1:], dtype=torch.bool, device=mask.device).triu(first + 1)
        if document is not None:
            hidden = hidden | (document[:, first : first + _ROWS_AT_ONCE, None] != document[:, None])
        is_different |= (rows != hidden).any()
    return is_different
