"""Kernels on parts of a segment: within its documents, and for some of its queries.

Tested in model/test_segment_attention.py by test_segments_equal_one_softmax.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import NamedTuple

import torch
from torch import Tensor

from ..packed_documents import CumulativeLengths, Documents, document_start, pieces
from ..segment import Segment
from .interface import DocumentKernel, Gradients, Kernel, Saved

Index = tuple[slice, slice | int]  # selects tokens and sequences of a tensor [n, b, ...]


class PartCall(NamedTuple):
    """One call of a kernel: for some queries, with the keys that end with the last of them. `lengths` are those of the
    documents for a kernel that takes them, else none."""

    queries: Index
    keys: Index
    lengths: tuple[CumulativeLengths, ...]


class SegmentCalls(NamedTuple):
    """All calls for the queries of a segment, the same in all attention layers. Of the keys that a layer gives, they
    see those from index `first` on."""

    calls: tuple[PartCall, ...]
    first: int


def on_parts(
    kernel: Kernel, segment: Segment | None, window: int | None, runs: Sequence[tuple[int, int]], query: Tensor
) -> Kernel:
    """`kernel` within the documents of a segment, or on a whole sequence if there is none, for some of the queries
    [n, b, h, d]: `runs` of them, each with its start and end, since context-parallel ranks that share heads have a part
    each. The keys are those of the segment, and of a `window` before it or of its whole prefix."""
    documents = None if segment is None else segment.documents
    if documents is None and len(runs) == 1:
        return kernel
    assert documents is None or query.shape[1] == len(documents), (
        f"attention got {query.shape[1]} sequences for a micro-batch of {len(documents)}: the script flattens packed "
        "batches; use --micro-batch-size 1"
    )
    # Where the lengths of documents lie, for a kernel that takes them.
    device = query.device if documents is not None and isinstance(kernel, DocumentKernel) else None
    start = 0 if segment is None else segment.start
    first_given = 0 if window is None else max(0, start - window)  # position of the first key that the layer gives
    known = {} if segment is None else segment.calls  # by other layers, too
    which = first_given, tuple(runs), device
    if which not in known:
        known[which] = _segment_calls(start, first_given, runs, documents, device)
    of_segment: SegmentCalls = known[which]
    return InCalls(kernel, calls=of_segment.calls, first=of_segment.first)


def _segment_calls(
    start: int,
    first_given: int,
    runs: Sequence[tuple[int, int]],
    documents: Documents | None,
    device: torch.device | None,
) -> SegmentCalls:
    first_seen = first_given
    if documents is not None:
        first_seen = min(document_start(starts, start, first_given) for starts in documents)
    calls = tuple(_calls(start, first_seen, runs, documents, device))
    return SegmentCalls(calls, first=first_seen - first_given)


def _calls(
    start: int,
    first_seen: int,
    runs: Sequence[tuple[int, int]],
    documents: Documents | None,
    device: torch.device | None,
) -> Iterator[PartCall]:
    """The calls for `runs` of queries of a segment from `start` on, and keys from position `first_seen` on: one for
    every run without documents; else one for every sequence of a run, with the lengths of its documents on `device`,
    or one for every document if that is None."""
    first_query = 0  # of the run, among the queries of all runs, one after the other
    for run_start, run_end in runs:
        shift = first_query - (start + run_start)  # from the position of a token to its place among the queries
        for number, starts in enumerate(documents or [(0,)]):
            if documents is None:
                sequence: slice | int = slice(None)  # all sequences at once
            elif device is None:
                sequence = slice(number, number + 1)  # a batch of one
            else:
                sequence = number  # without the dimension of the batch
            documents_of_run = pieces(starts, start + run_start, start + run_end, first_seen)
            groups = [documents_of_run]
            if device is None:
                groups = [[piece] for piece in documents_of_run]
            for group in groups:
                queries = slice(group[0].start + shift, group[-1].end + shift)
                keys = slice(group[0].first_key - first_seen, group[-1].end - first_seen)
                lengths = () if device is None else (CumulativeLengths.of(group, device),)
                yield PartCall(queries=(queries, sequence), keys=(keys, sequence), lengths=lengths)
        first_query += run_end - run_start


@dataclass(frozen=True)
class InCalls:
    """Runs `kernel` once for every call on the keys from `first` on; no two calls share a query, and a single call
    copies nothing. The gradients cover all keys from `first` on, so those of the segment after it find their rows."""

    kernel: Kernel
    calls: tuple[PartCall, ...]
    first: int

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        key = key[self.first :]
        value = value[self.first :]
        whole = query.new_empty(*query.shape[:3], value.shape[3]) if len(self.calls) > 1 else None
        statistics: list[Tensor] = []
        for call in self.calls:
            output, of_call = self.kernel.forward(query[call.queries], key[call.keys], value[call.keys], *call.lengths)
            statistics += of_call
            if whole is not None:
                whole[call.queries] = output
        if whole is None:
            whole = _as_sequences(output)
        return whole, tuple(statistics)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        key = key[self.first :]
        value = value[self.first :]

        def grads_of(call: PartCall, statistics_of_call: tuple[Tensor, ...]) -> Gradients:
            saved_of_call = Saved(
                query=query[call.queries],
                key=key[call.keys],
                value=value[call.keys],
                output=output[call.queries],
                statistics=statistics_of_call,
            )
            return self.kernel.backward(grad_output[call.queries], saved_of_call, *call.lengths)

        if len(self.calls) == 1:
            grads = grads_of(self.calls[0], statistics)
            return Gradients(
                query=_as_sequences(grads.query),
                key=_as_sequences(grads.key),
                value=_as_sequences(grads.value),
                sink=grads.sink,
            )
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key)
        grad_value = torch.zeros_like(value)
        grad_sink = None
        by_call = batched(statistics, len(statistics) // len(self.calls))
        for call, statistics_of_call in zip(self.calls, by_call, strict=True):
            grads = grads_of(call, statistics_of_call)
            grad_query[call.queries] = grads.query
            # Gradients may be of the last keys only.
            grad_key[call.keys][-len(grads.key) :].add_(grads.key)
            grad_value[call.keys][-len(grads.value) :].add_(grads.value)
            if grads.sink is not None:
                grad_sink = grads.sink if grad_sink is None else grad_sink + grads.sink
        return Gradients(query=grad_query, key=grad_key, value=grad_value, sink=grad_sink)


def _as_sequences(x: Tensor) -> Tensor:
    """[n, h, d] of one sequence to [n, 1, h, d]."""
    return x.unsqueeze(1) if x.dim() == 3 else x
