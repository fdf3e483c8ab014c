"""Keys and values of one layer and one micro-batch, and the gradients that later segments leave for earlier ones.

Later segments attend to earlier ones, so in the backward, which visits the segments in reverse, every segment adds to
the gradients of the keys and values before it. Seq1F1B (arXiv 2406.03488, section 3.2) calls for that accumulation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import Kernel, Saved
from .segment import Segment


class Seen(NamedTuple):
    """The keys and values that a segment sees, its own the last, as parts [n, b, g, d] one after the other."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Keys and values [m, b, g, d]; a part that is alone is not copied."""
        if len(self.keys) == 1:
            return self.keys[0], self.values[0]
        return torch.cat(self.keys), torch.cat(self.values)


class Inputs(NamedTuple):
    """What attention of a segment gets: query [n, b, h, d], key [n, b, g, d], value [n, b, g, e], and a sink [h]."""

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None


class GradientSums:
    """Gradients of tensors whose rows are tokens, for those before the segment that went backward last.

    They reach back as far as the keys that later segments saw. Sums are kept in at least fp32: rounding to 16 bits once
    per segment would make the error grow with the number of segments.
    """

    def __init__(self, sequence_length: int) -> None:
        self._start = sequence_length  # of the segment that went backward last
        self._sums: Sequence[Tensor] = ()

    def exchange(
        self, start: int, end: int, own: Sequence[Tensor], prefix: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """Leave gradients for earlier segments, take those that later segments left for this one.

        `own` are the gradients [end − start, ...] of the segment's rows by its own queries, `prefix` those [p, ...] of
        the p rows before it. Returns the complete gradients of the segment.
        """
        assert end == self._start, "segments went backward out of order"
        for grad, of_later in zip(own, self._sums, strict=bool(self._sums)):
            _last(grad, of_later.shape[0]).add_(_last(of_later, grad.shape[0]))
        rows_left = self._sums[0].shape[0] - (end - start) if self._sums else 0
        left = [of_later[:rows_left] for of_later in self._sums] if rows_left > 0 else ()
        self._start, self._sums = start, left
        if prefix is not None:
            of_later = left or [None] * len(prefix)
            self._sums = [_added(*pair) for pair in zip(prefix, of_later, strict=True)]
        return own


class SegmentCache(Protocol):
    """What attention keeps of one micro-batch from segment to segment."""

    def attend(self, inputs: Inputs, kernel: Kernel, segment: Segment, release: Callable[[], None]) -> Tensor:
        """The output [n, b, h·e] of a segment; the backward of the first segment ends with `release`."""


class _KeysAndValues(ABC):
    """Keys and values, and their gradients."""

    def __init__(self, sequence_length: int) -> None:
        self.gradients = GradientSums(sequence_length)

    def attend(self, inputs: Inputs, kernel: Kernel, segment: Segment, release: Callable[[], None]) -> Tensor:
        return _OneSegment.apply(*inputs, kernel, self, segment, release)

    @abstractmethod
    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> Seen:
        """Store the keys and values [n, b, g, d] of the n tokens of a segment; again, where recomputation runs its
        forward twice.

        Returns them with those of its prefix that it sees. To be called where autograd does not record.
        """

    def exchange_gradients(
        self, start: int, end: int, own: Sequence[Tensor], prefix: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """As `GradientSums.exchange`; the segment needs its keys and values no more."""
        return self.gradients.exchange(start, end, own, prefix)


class KVCache(_KeysAndValues):
    """Preallocated keys and values, each [S, b, g, d] for S tokens, b sequences, g KV heads of size d.

    Bytes per token and layer, with e bytes an element: 2·b·g·d·e from the first forward of the micro-batch to its last
    backward, and 2·b·g·d·max(e, 4) more for the gradients from its first backward to its last. Nothing is copied or
    concatenated as segments are added.
    """

    def __init__(self, sequence_length: int, key: Tensor, value: Tensor) -> None:
        super().__init__(sequence_length)
        self._keys = key.new_empty((sequence_length, *key.shape[1:]))
        self._values = value.new_empty((sequence_length, *value.shape[1:]))

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> Seen:
        self._keys[start:end].copy_(key)
        self._values[start:end].copy_(value)
        return Seen((self._keys[:end],), (self._values[:end],))


class WindowCache(_KeysAndValues):
    """Keys and values [n, b, g, d] of each segment apart, for n tokens, b sequences, g KV heads of size d.

    A query sees at most `window` keys before its own, so a segment joins a window of earlier keys to its own, not the
    prefix. Bytes, with e bytes an element: 2·b·g·d·e for every token of the segments in flight; 2·b·g·d·max(e, 4) for
    every token of a window between two backwards. Of a segment that was trimmed, at most a window stays.
    """

    def __init__(self, window: int, sequence_length: int) -> None:
        super().__init__(sequence_length)
        self._window = window
        # By the token `end`, in order: the rows of the segment that ends there, or the last of them if it was trimmed.
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> Seen:
        # Copies, since both are often parts of a larger tensor.
        self._rows[end] = key.clone(), value.clone()
        return self._between(max(0, start - self._window), end)

    def trim(self, keeps_earlier: bool) -> None:
        """Forget what later segments do not see of the segment written last, and of those before it unless
        `keeps_earlier`: no backward will follow, or only after the forward has run again."""
        end, (keys, _) = next(reversed(self._rows.items()))
        first = max(0, end - self._window)
        if keeps_earlier:
            first = max(first, end - keys.shape[0])
        kept = tuple(torch.cat(parts) for parts in self._between(first, end))
        self._rows = (self._rows if keeps_earlier else {}) | {end: kept}

    def exchange_gradients(
        self, start: int, end: int, own: Sequence[Tensor], prefix: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        del self._rows[end]
        return super().exchange_gradients(start, end, own, prefix)

    def _between(self, first: int, end: int) -> Seen:
        """The rows of the tokens from `first` to `end`, segment by segment."""
        of_segments = [
            [_last(x, stop - first) for x in rows]
            for stop, rows in self._rows.items()
            if stop == end or first < stop < end
        ]
        return Seen(*zip(*of_segments, strict=True))


class _OneSegment(torch.autograd.Function):
    """Attention of one segment; keys and values go to the cache, not to the graph.

    Later segments write other rows of the same buffers, which save_for_backward would take for a modification.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        kernel: Kernel,
        cache: _KeysAndValues,
        segment: Segment,
        release: Callable[[], None],
    ) -> Tensor:
        seen = cache.write(segment.start, segment.end, key, value)
        output, statistics = kernel.forward(query, *seen.joined())
        ctx.save_for_backward(query, output, *statistics)
        ctx.kernel, ctx.cache, ctx.segment, ctx.seen, ctx.release = kernel, cache, segment, seen, release
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        query, output, *statistics = ctx.saved_tensors
        segment, cache = ctx.segment, ctx.cache
        saved = Saved(query, *ctx.seen.joined(), output, tuple(statistics))
        grads = ctx.kernel.backward(grad_output, saved)
        own = cache.exchange_gradients(segment.start, segment.end, (grads.key, grads.value), grads.prefix)
        if segment.is_first:
            ctx.release()
        return grads.query, *own, grads.sink, None, None, None, None


def _added(grad: Tensor, left: Tensor | None) -> Tensor:
    """The sum in at least fp32 of `grad` and of what later segments left for the last of its rows."""
    if left is not None and left.shape[0] == grad.shape[0]:
        return left.add_(grad)
    dtype = torch.promote_types(grad.dtype, torch.float32)
    # A window is a part of the gradient of all keys that the segment sees, which a view would keep alive.
    sums = grad.to(dtype, copy=grad.untyped_storage().nbytes() > grad.nbytes)
    if left is not None:
        _last(sums, left.shape[0]).add_(left)
    return sums


def _last(tensor: Tensor, rows: int) -> Tensor:
    """The last rows of a tensor, all of them if it has fewer; a view costs the host as much as a small kernel."""
    return tensor if rows >= tensor.shape[0] else tensor[tensor.shape[0] - rows :]
