"""Each document of a segment in a call of its own, for any kernel."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched

import torch
from torch import Tensor

from ..documents import Documents, pieces
from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class DocumentsApart:
    """Runs `kernel` on every document of every sequence apart: the work is the sum over the documents."""

    kernel: Kernel
    documents: Documents

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output = query.new_empty(*query.shape[:2], query.shape[2] * value.shape[3])
        statistics: list[Tensor] = []
        for queries, keys in self._calls(query.shape[0], key.shape[0]):
            output[queries], of_call = self.kernel.forward(query[queries], key[keys], value[keys])
            statistics += of_call
        return output, tuple(statistics)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        # Keys of earlier segments whose documents have ended there get no gradient.
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        grad_sinks: list[Tensor] = []
        calls = list(self._calls(query.shape[0], key.shape[0]))
        by_call = batched(statistics, len(statistics) // len(calls))
        for (queries, keys), of_call in zip(calls, by_call, strict=True):
            part = Saved(query[queries], key[keys], value[keys], output[queries], of_call)
            grads = self.kernel.backward(grad_output[queries], part)
            grad_query[queries] = grads.query
            grad_sinks += [] if grads.sink is None else [grads.sink]
            prefixes = grads.prefix or (None, None)
            for whole, own, prefix in zip((grad_key, grad_value), (grads.key, grads.value), prefixes, strict=True):
                rows = whole[keys]
                rows[part.start :] = own
                if prefix is not None:
                    rows[: part.start] = prefix
        grad_sink = torch.stack(grad_sinks).sum(0) if grad_sinks else None
        return Gradients.of_all_keys(grad_query, grad_key, grad_value)._replace(sink=grad_sink)

    def _calls(self, num_queries: int, num_keys: int) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
        """Index of the queries and index of the keys of each piece."""
        start = num_keys - num_queries
        for sequence, starts in enumerate(self.documents):
            of_sequence = slice(sequence, sequence + 1)
            for piece in pieces(starts, start, num_keys):
                queries = slice(piece.start - start, piece.end - start)
                yield (queries, of_sequence), (slice(piece.first_key, piece.end), of_sequence)
