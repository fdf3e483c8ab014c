"""A kernel on parts of a segment: on the documents of packed sequences, or on some of the queries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched

import torch
from torch import Tensor

from ..packed_documents import VisibleDocuments, pieces
from .interface import DocumentKernel, Gradients, Kernel, Saved

# What selects tokens of a tensor [n, b, ...], and perhaps sequences.
Index = slice | tuple[slice, ...]


def on_parts(
    kernel: Kernel, prefix: int, runs: Sequence[tuple[int, int]], documents: VisibleDocuments | None
) -> Kernel:
    """`kernel` for some of the queries of a segment behind `prefix` keys of earlier ones; within the documents.

    Queries come one run after the other; `runs` are where each starts and ends in the segment. Context-parallel ranks
    that share heads have a part of the queries each.
    """
    if documents is not None and isinstance(kernel, DocumentKernel):
        kernel, documents = DocumentsPacked(kernel, documents), None
    if documents is None and len(runs) == 1:
        return kernel
    return InCalls(kernel, tuple(_calls(prefix, runs, documents)))


def _calls(
    prefix: int, runs: Sequence[tuple[int, int]], documents: VisibleDocuments | None
) -> Iterator[tuple[Index, Index]]:
    """Index of the queries and of the keys of every run, or of every document within it."""
    done = 0
    for start, end in runs:
        if documents is None:
            yield slice(done, done + end - start), slice(prefix + end)
        else:
            before = done - prefix - start  # from a position among the keys to one among the queries
            for number, starts in enumerate(documents.starts):
                sequence = slice(number, number + 1)
                for piece in pieces(starts, prefix + start, prefix + end):
                    queries = slice(before + piece.start, before + piece.end)
                    yield (queries, sequence), (slice(piece.first_key, piece.end), sequence)
        done += end - start


@dataclass(frozen=True)
class InCalls:
    """Runs `kernel` once for every pair of queries and of keys that end with the last of these queries.

    No two `calls` have a query in common.
    """

    kernel: Kernel
    calls: tuple[tuple[Index, Index], ...]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        statistics: list[Tensor] = []
        for queries, keys in self.calls:
            output[queries], of_call = self.kernel.forward(query[queries], key[keys], value[keys])
            statistics += of_call
        return output, tuple(statistics)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        # Keys that no call sees get no gradient.
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        grad_sinks: list[Tensor] = []
        by_call = batched(statistics, len(statistics) // len(self.calls))
        for (queries, keys), of_call in zip(self.calls, by_call, strict=True):
            part = Saved(query[queries], key[keys], value[keys], output[queries], of_call)
            grads = self.kernel.backward(grad_output[queries], part)
            grad_query[queries] = grads.query
            grad_sinks += [] if grads.sink is None else [grads.sink]
            for whole, grad in ((grad_key, grads.key), (grad_value, grads.value)):
                whole[keys][-len(grad) :] += grad
        return Gradients(grad_query, grad_key, grad_value, torch.stack(grad_sinks).sum(0) if grad_sinks else None)


@dataclass(frozen=True)
class DocumentsPacked:
    """Runs a kernel once on all documents: the sequences come one after the other, without the keys that none sees.

    With one sequence in a micro-batch nothing is copied.
    """

    kernel: DocumentKernel
    documents: VisibleDocuments

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        start = len(key) - len(query)
        lengths = self.documents.cumulative_lengths(start, len(key), query.device)
        keys, values = (self._seen(x, start) for x in (key, value))
        output, statistics = self.kernel.forward(_joined(query), keys, values, lengths)
        return self._apart(output).contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        start = len(key) - len(query)
        lengths = self.documents.cumulative_lengths(start, len(key), query.device)
        packed = Saved(_joined(query), self._seen(key, start), self._seen(value, start), _joined(output), statistics)
        grads = self.kernel.backward(_joined(grad_output), packed, lengths)
        of_keys, of_values = (
            self._of_tokens(grad, whole, start) for grad, whole in ((grads.key, key), (grads.value, value))
        )
        return Gradients(self._apart(grads.query), of_keys, of_values)

    def _rows(self, x: Tensor, start: int) -> Iterator[Tensor]:
        """Of [m, b, g, d] the rows [u, g, d] that the segment sees of each sequence, as views."""
        for sequence, starts in enumerate(self.documents.starts):
            yield x[pieces(starts, start, x.shape[0])[0].first_key :, sequence]

    def _seen(self, x: Tensor, start: int) -> Tensor:
        rows = list(self._rows(x, start))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _of_tokens(self, grad: Tensor, whole: Tensor, start: int) -> Tensor:
        """The gradient [t, g, d] of what is seen of `whole` [m, b, g, d] as that of its last tokens [u, b, g, d]."""
        if whole.shape[1] == 1:
            return grad.unsqueeze(1)
        # Keys of earlier segments whose documents have ended there get no gradient.
        of_all = torch.zeros_like(whole)
        seen = list(self._rows(of_all, start))
        for rows, of_sequence in zip(seen, grad.split([len(rows) for rows in seen]), strict=True):
            rows.copy_(of_sequence)
        return of_all

    def _apart(self, x: Tensor) -> Tensor:
        """[b·n, h, d] to [n, b, h, d]."""
        return x.unflatten(0, (len(self.documents.starts), -1)).transpose(0, 1)


def _joined(x: Tensor) -> Tensor:
    """[n, b, h, d] to [b·n, h, d]."""
    return x.transpose(0, 1).flatten(0, 1)
