"""Keys and values of one layer and one micro-batch, and their gradients.

The backward visits the segments in reverse, and every segment adds to the gradients of the keys and values before it
(Seq1F1B, arXiv 2406.03488, section 3.2).

Tested in model/test_segment_attention.py by test_segments_in_flight_are_kept_and_gradients_of_a_window.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..carried import Carried
from ..kernels import Gradients
from ..memory.storages import tensor_of


class Rows:
    """One tensor [S, b, ...] of keys or values, preallocated and written segment by segment, and its gradient so far.

    Segments go backward in reverse. The sum covers the rows before the segment that went backward last; with a window,
    only as far back as later segments saw them. It is in at least fp32: rounded in every segment, its error would grow
    with their number.
    """

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length
        self._rows: Any = None  # a tensor, or its handle while it rests
        # The first rows, up to an end; making such a view costs the host as much as a small kernel.
        self._first: dict[int, Tensor] = {}
        self._start = sequence_length  # of the segment that went backward last
        self._sum: Tensor | None = None  # of gradients

    def place(self, rows: Tensor) -> None:
        """Use [S, b, ...], which may be a view, instead of a tensor of its own."""
        self._rows = rows

    def write(self, start: int, end: int, rows: Tensor) -> None:
        if self._rows is None:
            self._rows = rows.new_empty((self._length, *rows.shape[1:]))
        self._rows = tensor_of(self._rows)
        self._rows[start:end].copy_(rows)

    def read(self, start: int, end: int) -> Tensor:
        """The rows that the tokens `start` to `end` see, outside the graph, which later writes would invalidate."""
        assert self._rows is not None, "segments went forward out of order"
        if end not in self._first:
            self._rows = tensor_of(self._rows)
            self._first[end] = self._rows[:end]
        return self._first[end]

    def trim(self, keeps_earlier: bool) -> None:
        """Forget what later segments do not see: here nothing, as they see all rows."""

    def tensors(self) -> list[Tensor]:
        """The tensors that are held now, views among them."""
        held = [self._rows, self._sum, *self._first.values()]
        return [tensor for tensor in held if isinstance(tensor, Tensor)]

    def to_host(self, keep: Callable[[Tensor], Any]) -> None:
        """Replace the rows by what `keep` returns, see HostMemory, until a backward uses them."""
        rows = self._rows
        self._rows = keep(self._rows)
        if self._rows is not rows:
            self._first.clear()

    def exchange(self, start: int, end: int, grad: Tensor) -> Tensor:
        """The complete gradient [end − start, ...] of a segment's own rows, in its backward.

        `grad` [u, ...] is what the queries of the segment give to the last u rows up to `end`, all of its own among
        them; it is written to. With grad_t[s] for what the queries of segment t give to the rows of segment s, `grad`
        and the sum over later segments are both divided at `start`:

            returned = Σ grad_t[s] over t >= s
            kept for s' < s = Σ grad_t[s'] over t >= s
        """
        assert end == self._start, "segments went backward out of order"
        self._start = start
        grad_before, own = _parted(grad, end - start)
        sum_before = self._sum
        if sum_before is not None:
            # Later segments may see fewer rows: with a window, or if a document starts within this segment.
            sum_before, of_own = _parted(sum_before, len(own))
            _last(own, len(of_own)).add_(of_own)
        self._sum = sum_before if grad_before is None else _added(grad_before, sum_before)
        return own


class WindowRows(Rows):
    """One tensor [n, b, ...] per segment, since a token sees no more than `window` rows before its own."""

    def __init__(self, sequence_length: int, window: int) -> None:
        super().__init__(sequence_length)
        self._window = window
        # The rows of each segment, or the last of them if it was trimmed, by its end, ascending.
        self._kept: dict[int, Any] = {}

    def write(self, start: int, end: int, rows: Tensor) -> None:
        self._kept[end] = rows.clone()  # often a view of a larger tensor

    def read(self, start: int, end: int) -> Tensor:
        return self._between(max(0, start - self._window), end)

    def tensors(self) -> list[Tensor]:
        kept = [rows for rows in self._kept.values() if isinstance(rows, Tensor)]  # others are on the host
        return [*super().tensors(), *kept]

    def to_host(self, keep: Callable[[Tensor], Any]) -> None:
        self._kept = {end: keep(rows) for end, rows in self._kept.items()}

    def trim(self, keeps_earlier: bool) -> None:
        """Forget the rows of the latest segment that later ones do not see, and all earlier segments unless it
        `keeps_earlier` ones. For forwards that no backward follows, or a repeated forward first."""
        end, rows = next(reversed(self._kept.items()))  # of the latest segment
        first = max(0, end - self._window)
        if keeps_earlier:
            first = max(first, end - len(rows))
        last_rows = self._between(first, end).clone()
        if not keeps_earlier:
            self._kept.clear()
        self._kept[end] = last_rows

    def exchange(self, start: int, end: int, grad: Tensor) -> Tensor:
        del self._kept[end]
        return super().exchange(start, end, grad)

    def _between(self, first: int, end: int) -> Tensor:
        """The rows of the tokens from `first` to `end`, without a copy if they are of one segment."""
        seen = [stop for stop in self._kept if stop == end or first < stop < end]
        for stop in seen:
            self._kept[stop] = tensor_of(self._kept[stop])
        parts = [_last(self._kept[stop], stop - first) for stop in seen]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class KVCache(Carried):
    """Keys and values, each [S, b, g, d] for S tokens, b sequences, g KV heads of size d, preallocated.

    Bytes per token and layer, with e bytes an element: 2·b·g·d·e from the first forward of the micro-batch to its last
    backward, and 2·b·g·d·max(e, 4) for the gradients from its first backward to its last. With a `window`, keys and
    values are kept for segments in flight and for the last `window` tokens of a trimmed segment, gradients for `window`
    tokens between two backwards. If they are `side_by_side`, the values of a head follow its keys in memory, not with a
    window; it saves `Padded` a copy.
    """

    def __init__(self, length: int, window: int | None = None, side_by_side: bool = False) -> None:
        self.rows = (_rows(length, window), _rows(length, window))  # of keys, and of values
        self.prefix: Tensor | None = None  # that of the running segment if it is a part of the graph, to get gradients
        self._length = length
        self._shares_buffer = side_by_side and window is None
        self._has_buffer = False

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        """Store the keys [n, b, g, d] and values [n, b, g, e] of a segment, again if its forward is repeated."""
        if self._shares_buffer and not self._has_buffer:
            self._make_buffer(key, value)
        for rows, of_segment in zip(self.rows, (key, value), strict=True):
            rows.write(start, end, of_segment)

    def _make_buffer(self, key: Tensor, value: Tensor) -> None:
        """Place the rows of keys and of values side by side in one buffer, for heads like these."""
        keys, values = self.rows
        size = key.shape[3]
        both = key.new_empty((self._length, *key.shape[1:3], size + value.shape[3]))
        keys.place(both[..., :size])
        values.place(both[..., size:])
        self._has_buffer = True

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """The keys and values [m, b, g, ...] that the segment sees; its own are the last."""
        keys, values = self.rows
        return keys.read(start, end), values.read(start, end)

    def tensors(self) -> list[Tensor]:
        keys, values = self.rows
        prefix = [] if self.prefix is None else [self.prefix]
        return [*keys.tensors(), *values.tensors(), *prefix]

    def end_forward(self, has_graph: bool, has_backward: bool) -> None:
        if not has_graph:
            for rows in self.rows:
                rows.trim(keeps_earlier=has_backward)

    def to_host(self, keep: Callable[[Tensor], Any]) -> None:
        for rows in self.rows:
            rows.to_host(keep)

    def exchange_gradients(self, start: int, end: int, grads: Gradients) -> tuple[Tensor, Tensor, Tensor | None]:
        """The complete gradients of the segment's keys and values, and of the `prefix`, see `Rows`; the keys and values
        of the segment are not needed any more."""
        keys, values = self.rows
        return keys.exchange(start, end, grads.key), values.exchange(start, end, grads.value), None


def _rows(length: int, window: int | None) -> Rows:
    return Rows(length) if window is None else WindowRows(length, window)


def _added(grad: Tensor, left: Tensor | None) -> Tensor:
    """The sum of `grad` and the gradient that later segments left for the last of its rows, in at least fp32."""
    if left is not None and len(left) == len(grad):
        return left.add_(grad)
    dtype = torch.promote_types(grad.dtype, torch.float32)
    # A view would keep alive the gradient of all keys that the segment sees.
    sums = grad.to(dtype, copy=grad.untyped_storage().nbytes() > grad.nbytes)
    if left is not None:
        _last(sums, len(left)).add_(left)
    return sums


def _parted(tensor: Tensor, length: int) -> tuple[Tensor | None, Tensor]:
    """The rows before the last `length`, or None, and the last `length`; no view if these are all."""
    before = len(tensor) - length
    return tensor.split([before, length]) if before > 0 else (None, tensor)


def _last(tensor: Tensor, rows: int) -> Tensor:
    """The last `rows` of a tensor; the tensor itself if it has no more."""
    return tensor if rows >= tensor.shape[0] else tensor[tensor.shape[0] - rows :]
