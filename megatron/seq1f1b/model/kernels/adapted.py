"""Wrappers of a kernel: for other head sizes, a softmax with a sink, layers that are recomputed, parts of a segment.

Tested in model/test_segment_attention.py by test_recomputed_gradients_are_bitwise_equal.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..memory.host_memory import tensor_of
from ..packed_documents import CumulativeLengths, Documents, document_start, pieces
from ..segment import KeptAttention, Segment
from .interface import DocumentKernel, Gradients, Kernel, Saved


@dataclass(frozen=True)
class Padded:
    """Brings heads to one size, a multiple of `multiple_of`: the smaller value heads of multi-latent attention, and odd
    sizes. Zeros are put before the numbers of each head, in copies that live for the call only.

    Values need no copy if they have other numbers before them in memory, such as the keys of the same head: the kernel
    takes those for a part of the values, too. They change only numbers of the output that are dropped, and get no
    gradient, since that of the output is zero there. They have to be finite, and to begin at a multiple of
    `multiple_of`, as kernels read several numbers at once.
    """

    kernel: Kernel
    multiple_of: int = 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        size = self._size(query, value)
        output, statistics = self.kernel.forward(_padded(query, size), _padded(key, size), self._widened(value, size))
        return output[..., size - value.shape[3] :].contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        size = self._size(saved.query, saved.value)
        of_one_size = Saved(
            query=_padded(saved.query, size),
            key=_padded(saved.key, size),
            value=self._widened(saved.value, size),
            output=_padded(saved.output, size),
            statistics=saved.statistics,
        )
        grads = self.kernel.backward(_padded(grad_output, size), of_one_size)
        return Gradients(*(grad[..., size - x.shape[3] :] for grad, x in zip(grads[:3], saved[:3], strict=True)))

    def _size(self, query: Tensor, value: Tensor) -> int:
        largest = max(query.shape[3], value.shape[3])
        return -(-largest // self.multiple_of) * self.multiple_of

    def takes_values_beside_keys(self, size: int, value_size: int) -> bool:
        """Whether values that follow the keys of their head in memory need no copy."""
        return value_size < size and not size % self.multiple_of and not value_size % self.multiple_of

    def _widened(self, value: Tensor, size: int) -> Tensor:
        """The values [m, b, g, e] with what lies before each head, or with zeros if heads lie too close together."""
        missing = size - value.shape[3]
        if not missing:
            return value
        start = value.storage_offset() - missing
        steps = [stride for stride, number in zip(value.stride()[:3], value.shape[:3], strict=True) if number > 1]
        is_apart = value.stride(3) == 1 and start >= 0 and all(step >= size for step in steps)
        if not is_apart or any(place % self.multiple_of for place in (start, *steps)):
            return _padded(value, size)
        return value.as_strided((*value.shape[:3], size), value.stride(), start)


def _padded(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[3]
    return torch.nn.functional.pad(x, (missing, 0)) if missing else x


@dataclass(frozen=True)
class WithSink:
    """Adds a `sink` [h] to the softmax of any kernel, a term in the denominator of each head that has no value:

        weight_j = exp(score_j) / (exp(sink) + Σ_k exp(score_k))

    With sink 0 that is the off-by-one softmax; gpt-oss (arXiv 2508.10925) learns one for each head. The sink scales the
    output down and changes the log-sum-exp, the first of the statistics, from which the kernel's backward starts.
    """

    kernel: Kernel
    sink: Tensor

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, (logsumexp, *others) = self.kernel.forward(query, key, value)
        own, sink = self._by_head(logsumexp, query)
        total = torch.logaddexp(own, sink)
        kept = (own - total).exp().permute(2, 0, 1).unsqueeze(-1)
        return (output * kept).to(output.dtype), (total.view_as(logsumexp), *others)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        total, sink = self._by_head(saved.statistics[0], saved.query)
        # Σ weight · its gradient over the keys of a query; the sink has no value, so it adds nothing.
        expected = (grad_output * saved.output).to(total.dtype).sum(-1)
        grad_sink = -((sink - total).exp() * expected.permute(1, 2, 0)).sum((0, 2)).to(self.sink.dtype)
        return self.kernel.backward(grad_output, saved)._replace(sink=grad_sink)

    def _by_head(self, logsumexp: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp as [b, h, n], however the kernel groups heads, and the sink as [h, 1]."""
        length, batch, heads, _ = query.shape
        return logsumexp.view(batch, heads, length), self.sink.detach().to(logsumexp.dtype).unsqueeze(-1)


@dataclass(frozen=True)
class RunOnce:
    """Runs `kernel` once where full recomputation repeats the forward of a layer's `unit`.

    The first forward, without autograd, leaves what `keep` makes of output and statistics in `kept`; the repeated one
    takes them, so that the graph does not keep itself alive. A forward without autograd between them, of a module that
    is recomputed within another, only reads them. In between a layer keeps b·n·h·(e·w + 4) bytes, for n tokens of b
    sequences, h query heads, values of size e and w bytes an element. The state of the random `generator` after the
    first forward is restored for the rest of the layer; it is None if the kernel draws nothing.
    """

    kernel: Kernel
    kept: KeptAttention
    keep: Callable[[Tensor], Any]
    unit: Hashable
    generator: torch.Generator | None
    is_recorded: bool = field(default_factory=torch.is_grad_enabled)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.unit in self.kept:
            results, state = self.kept.pop(self.unit) if self.is_recorded else self.kept[self.unit]
            if self.generator is not None and state is not None:
                self.generator.set_state(state)
            first_output, *first_statistics = map(tensor_of, results)
            return first_output, tuple(first_statistics)
        output, statistics = self.kernel.forward(query, key, value)
        if not self.is_recorded:
            state = None if self.generator is None else self.generator.get_state()
            self.kept[self.unit] = [self.keep(x) for x in (output, *statistics)], state
        return output, statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        return self.kernel.backward(grad_output, saved)


Index = tuple[slice, slice | int]  # selects tokens and sequences of a tensor [n, b, ...]


class PartCall(NamedTuple):
    """One call of a kernel: for some queries, with the keys that end with the last of them. `lengths` are those of the
    documents for a kernel that takes them, else none."""

    queries: Index
    keys: Index
    lengths: tuple[CumulativeLengths, ...]


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
    device = query.device if documents is not None and isinstance(kernel, DocumentKernel) else None
    start, made = (0, {}) if segment is None else (segment.start, segment.calls)
    first_key = 0 if window is None else max(0, start - window)
    key = first_key, tuple(runs), device
    if key not in made:
        seen = min((document_start(starts, start, first_key) for starts in documents or ()), default=first_key)
        made[key] = tuple(_calls(start, seen, runs, documents, device)), seen - first_key
    return InCalls(kernel, *made[key])


def _calls(
    start: int,
    first_key: int,
    runs: Sequence[tuple[int, int]],
    documents: Documents | None,
    device: torch.device | None,
) -> Iterator[PartCall]:
    """One call for every run, or one for every sequence of a run with the lengths of its documents on `device`, or one
    for every document if that is None."""
    shift = -start  # from the position of a token to its place among the queries
    for run_start, run_end in runs:
        shift -= run_start
        for number, starts in enumerate(documents or [(0,)]):
            if documents is None:
                sequence: slice | int = slice(None)  # all sequences at once
            elif device is None:
                sequence = slice(number, number + 1)  # a batch of one
            else:
                sequence = number  # without the dimension of the batch
            found = pieces(starts, start + run_start, start + run_end, first_key)
            for group in [[piece] for piece in found] if device is None else [found]:
                queries = slice(group[0].start + shift, group[-1].end + shift)
                keys = slice(group[0].first_key - first_key, group[-1].end - first_key)
                lengths = () if device is None else (CumulativeLengths.of(group, device),)
                yield PartCall(queries=(queries, sequence), keys=(keys, sequence), lengths=lengths)
        shift += run_end


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
        return _as_sequences(output) if whole is None else whole, tuple(statistics)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        key = key[self.first :]
        value = value[self.first :]
        by_call = batched(statistics, len(statistics) // len(self.calls))
        grads = (
            self.kernel.backward(
                grad_output[call.queries],
                Saved(
                    query=query[call.queries],
                    key=key[call.keys],
                    value=value[call.keys],
                    output=output[call.queries],
                    statistics=of_call,
                ),
                *call.lengths,
            )
            for call, of_call in zip(self.calls, by_call, strict=True)
        )
        if len(self.calls) == 1:
            only = next(grads)
            return Gradients(_as_sequences(only.query), _as_sequences(only.key), _as_sequences(only.value), only.sink)
        whole = Gradients(torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value))
        for call, of_part in zip(self.calls, grads, strict=True):
            whole.query[call.queries] = of_part.query
            for of_whole, part in ((whole.key, of_part.key), (whole.value, of_part.value)):
                of_whole[call.keys][-len(part) :].add_(part)
            if of_part.sink is not None:
                whole = whole._replace(sink=of_part.sink if whole.sink is None else whole.sink + of_part.sink)
        return whole


def _as_sequences(x: Tensor) -> Tensor:
    """[n, h, d] of one sequence to [n, 1, h, d]."""
    return x.unsqueeze(1) if x.dim() == 3 else x
