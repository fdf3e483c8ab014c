"""Attention within documents, where sequences are packed."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import Gradients, Kernel

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


@dataclass(frozen=True)
class WithinDocuments:
    """Runs `kernel` on every document of every sequence apart: the work is the sum over the documents."""

    kernel: Kernel
    documents: Documents

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        output = query.new_empty(*query.shape[:2], query.shape[2] * value.shape[3])
        saved: list[Tensor] = []
        for queries, keys, before in self._calls(start, key.shape[0]):
            output[queries], kept = self.kernel.forward(query[queries], key[keys], value[keys], before, scale, dropout)
            saved += kept
        return output, tuple(saved)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        saved: tuple[Tensor, ...],
        start: int,
        scale: float,
        dropout: float,
    ) -> Gradients:
        # Keys of earlier segments whose documents have ended there get no gradient.
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        calls = list(self._calls(start, key.shape[0]))
        saved_by_call = batched(saved, len(saved) // len(calls))
        for (queries, keys, before), kept in zip(calls, saved_by_call, strict=True):
            grads = self.kernel.backward(
                grad_output[queries],
                query[queries],
                key[keys],
                value[keys],
                output[queries],
                kept,
                before,
                scale,
                dropout,
            )
            grad_query[queries] = grads.query
            prefixes = grads.prefix or (None, None)
            for whole, own, prefix in zip((grad_key, grad_value), (grads.key, grads.value), prefixes, strict=True):
                part = whole[keys]
                part[before:] = own
                if prefix is not None:
                    part[:before] = prefix
        return Gradients.of_all_keys(grad_query, grad_key, grad_value, start)

    def _calls(self, start: int, end: int) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], int]]:
        """Index of the queries, index of the keys and number of keys before the queries, for each piece."""
        for sequence, starts in enumerate(self.documents):
            of_sequence = slice(sequence, sequence + 1)
            for piece in pieces(starts, start, end):
                queries = slice(piece.start - start, piece.end - start)
                keys = slice(piece.first_key, piece.end)
                yield (queries, of_sequence), (keys, of_sequence), piece.start - piece.first_key
