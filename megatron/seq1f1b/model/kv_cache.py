"""Keys and values of one layer and one micro-batch, and the gradients that later segments leave for earlier ones.

Later segments attend to earlier ones, so in the backward, which visits the segments in reverse, every segment adds to
the gradients of the keys and values before it. Seq1F1B (arXiv 2406.03488, section 3.2) calls for that accumulation.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels import Gradients


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


class SegmentCache(ABC):
    """What attention keeps of one layer and one micro-batch from segment to segment.

    To be called where autograd does not record.
    """

    @abstractmethod
    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        """Store the keys [n, b, g, d] and values [n, b, g, e] of a segment; again, where its forward runs twice."""

    @abstractmethod
    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """The keys and values [m, b, g, ...] that the segment sees, its own the last."""

    @abstractmethod
    def exchange_gradients(self, start: int, end: int, grads: Gradients) -> tuple[Tensor, Tensor, Tensor | None]:
        """Leave gradients for earlier segments, take those that later segments left for this one, whose keys and values
        are not needed any more.

        Returns the complete gradients of the segment's keys and values, and that of what `take_prefix` returned.
        """

    def take_prefix(self) -> Tensor | None:
        """The prefix of the running segment as a part of the graph, None where its gradients are left in the cache."""
        return None


class KVCache(SegmentCache):
    """Preallocated keys and values, each [S, b, g, d] for S tokens, b sequences, g KV heads of size d.

    Bytes per token and layer, with e bytes an element: 2·b·g·d·e from the first forward of the micro-batch to its last
    backward, and 2·b·g·d·max(e, 4) more for the gradients from its first backward to its last. Nothing is copied or
    concatenated as segments are added.
    """

    def __init__(self, sequence_length: int, key: Tensor, value: Tensor) -> None:
        self._keys = key.new_empty((sequence_length, *key.shape[1:]))
        self._values = value.new_empty((sequence_length, *value.shape[1:]))
        self.gradients = GradientSums(sequence_length)

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        self._keys[start:end].copy_(key)
        self._values[start:end].copy_(value)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._keys[:end], self._values[:end]

    def exchange_gradients(self, start: int, end: int, grads: Gradients) -> tuple[Tensor, Tensor, Tensor | None]:
        return *self.gradients.exchange(start, end, (grads.key, grads.value), grads.prefix), None


class WindowCache(SegmentCache):
    """Keys and values [n, b, g, d] of each segment apart, for n tokens, b sequences, g KV heads of size d.

    A query sees at most `window` keys before its own, so a segment joins a window of earlier keys to its own, not the
    prefix. Bytes, with e bytes an element: 2·b·g·d·e for every token of the segments in flight; 2·b·g·d·max(e, 4) for
    every token of a window between two backwards. Of a segment that was trimmed, at most a window stays.
    """

    def __init__(self, window: int, sequence_length: int) -> None:
        self._window = window
        # By the token `end`, in order: the rows of the segment that ends there, or the last of them if it was trimmed.
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradients = GradientSums(sequence_length)

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        # Copies, since both are often parts of a larger tensor.
        self._rows[end] = key.clone(), value.clone()

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._between(max(0, start - self._window), end)

    def exchange_gradients(self, start: int, end: int, grads: Gradients) -> tuple[Tensor, Tensor, Tensor | None]:
        del self._rows[end]
        return *self.gradients.exchange(start, end, (grads.key, grads.value), grads.prefix), None

    def trim(self, keeps_earlier: bool) -> None:
        """Forget what later segments do not see of the segment written last, and of those before it unless
        `keeps_earlier`: no backward will follow, or only after the forward has run again."""
        end, (keys, _) = next(reversed(self._rows.items()))
        first = max(0, end - self._window)
        if keeps_earlier:
            first = max(first, end - keys.shape[0])
        kept = tuple(rows.clone() for rows in self._between(first, end))
        self._rows = (self._rows if keeps_earlier else {}) | {end: kept}

    def _between(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows of the tokens from `first` to `end`; those of one segment are not copied."""
        keys, values = zip(
            *(
                [_last(x, stop - first) for x in rows]
                for stop, rows in self._rows.items()
                if stop == end or first < stop < end
            ),
            strict=True,
        )
        return (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys), torch.cat(values))


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
