"""Keys and values of one layer and one micro-batch, and the gradients that later segments leave for earlier ones.

Later segments attend to earlier ones, so in the backward, which visits the segments in reverse, every segment adds to
the gradients of the keys and values before it. Seq1F1B (arXiv 2406.03488, section 3.2) calls for that accumulation.
"""

import torch
from torch import Tensor

from .kernels import Gradients


class Rows:
    """One tensor [S, b, ...], preallocated and written segment by segment, and its gradient.

    The gradient is that of the rows before the segment that went backward last, as far back as the keys that later
    segments saw. Sums are kept in at least fp32: rounding to 16 bits once per segment would make the error grow with
    the number of segments.
    """

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length
        self._rows: Tensor | None = None
        # By their end, since forward and backward read the same; a view costs the host as much as a small kernel.
        self._first: dict[int, Tensor] = {}
        self._start = sequence_length  # of the segment that went backward last
        self._sum: Tensor | None = None

    def write(self, start: int, end: int, rows: Tensor) -> None:
        if self._rows is None:
            self._rows = rows.new_empty((self._length, *rows.shape[1:]))
        self._rows[start:end].copy_(rows)

    def read(self, end: int) -> Tensor:
        """The first rows. Later segments write others, which autograd would take for a modification of these."""
        assert self._rows is not None, "segments went forward out of order"
        if end not in self._first:
            self._first[end] = self._rows[:end]
        return self._first[end]

    def exchange(self, start: int, end: int, grad: Tensor) -> Tensor:
        """Leave gradients for earlier segments, take those that later segments left for this one.

        `grad` is the gradient [u, ...] of the last u rows up to `end` by the segment's own queries, and is written to.
        Returns the complete gradient [end − start, ...] of the segment.
        """
        assert end == self._start, "segments went backward out of order"
        left, self._start = self._sum, start
        before, own = _parted(grad, end - start)
        if left is not None:
            left, of_own = _parted(left, len(own))
            _last(own, len(of_own)).add_(of_own)
        self._sum = left if before is None else _added(before, left)
        return own


class KVCache:
    """What attention keeps of one layer and one micro-batch from segment to segment. To be called where autograd does
    not record.

    Keys and values are preallocated, each [S, b, g, d] for S tokens, b sequences, g KV heads of size d. Bytes per token
    and layer, with e bytes an element: 2·b·g·d·e from the first forward of the micro-batch to its last backward, and
    2·b·g·d·max(e, 4) more for the gradients from its first backward to its last. Nothing is copied or concatenated as
    segments are added.
    """

    def __init__(self, sequence_length: int) -> None:
        self.rows = Rows(sequence_length), Rows(sequence_length)

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        """Store the keys [n, b, g, d] and values [n, b, g, e] of a segment; again, where its forward runs twice."""
        keys, values = self.rows
        keys.write(start, end, key)
        values.write(start, end, value)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """The keys and values [m, b, g, ...] that the segment sees, its own the last."""
        keys, values = self.rows
        return keys.read(end), values.read(end)

    def exchange_gradients(self, start: int, end: int, grads: Gradients) -> tuple[Tensor, Tensor, Tensor | None]:
        """Leave gradients for earlier segments, take those that later segments left for this one, whose keys and values
        are not needed any more.

        Returns the complete gradients of the segment's keys and values, and that of what `take_prefix` returned.
        """
        keys, values = self.rows
        return keys.exchange(start, end, grads.key), values.exchange(start, end, grads.value), None

    def take_prefix(self) -> Tensor | None:
        """The prefix of the running segment as a part of the graph, None where its gradients are left in the cache."""
        return None


class WindowCache(KVCache):
    """Keys and values [n, b, g, d] of each segment apart, for n tokens, b sequences, g KV heads of size d.

    A query sees at most `window` keys before its own, so a segment joins a window of earlier keys to its own, not the
    prefix. Bytes, with e bytes an element: 2·b·g·d·e for every token of the segments in flight; 2·b·g·d·max(e, 4) for
    every token of a window between two backwards. Of a segment that was trimmed, at most a window stays.
    """

    def __init__(self, window: int, sequence_length: int) -> None:
        super().__init__(sequence_length)
        self._window = window
        # By the token `end`, in order: the rows of the segment that ends there, or the last of them if it was trimmed.
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        # Copies, since both are often parts of a larger tensor.
        self._kept[end] = key.clone(), value.clone()

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._between(max(0, start - self._window), end)

    def exchange_gradients(self, start: int, end: int, grads: Gradients) -> tuple[Tensor, Tensor, Tensor | None]:
        del self._kept[end]
        return super().exchange_gradients(start, end, grads)

    def trim(self, keeps_earlier: bool) -> None:
        """Forget what later segments do not see of the segment written last, and of those before it unless
        `keeps_earlier`: no backward will follow, or only after the forward has run again."""
        end, (keys, _) = next(reversed(self._kept.items()))
        first = max(0, end - self._window)
        if keeps_earlier:
            first = max(first, end - keys.shape[0])
        kept = tuple(rows.clone() for rows in self._between(first, end))
        self._kept = (self._kept if keeps_earlier else {}) | {end: kept}

    def _between(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows of the tokens from `first` to `end`; those of one segment are not copied."""
        keys, values = zip(
            *(
                [_last(x, stop - first) for x in rows]
                for stop, rows in self._kept.items()
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


def _parted(tensor: Tensor, length: int) -> tuple[Tensor | None, Tensor]:
    """The rows before the last `length`, if there are any, and these, without a view of a tensor that has no more."""
    before = len(tensor) - length
    return tensor.split([before, length]) if before > 0 else (None, tensor)


def _last(tensor: Tensor, rows: int) -> Tensor:
    """The last rows of a tensor, all of them if it has fewer, without a view of them."""
    return tensor if rows >= tensor.shape[0] else tensor[tensor.shape[0] - rows :]
