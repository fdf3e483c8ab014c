"""Keys and values of one layer with a sliding window and one micro-batch, and the gradients that later segments leave
for earlier ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .kv_cache import Seen


class WindowCache:
    """Keys and values [n, b, g, d] of each segment apart, for n tokens, b sequences, g KV heads of size d.

    A query sees at most `window` keys before its own, so a segment joins a window of earlier keys to its own, not the
    prefix. Bytes, with e bytes an element: 2·b·g·d·e for every token of the segments in flight; 2·b·g·d·max(e, 4) for
    every token of a window between two backwards. Of a segment that was trimmed, at most a window stays.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        # By the token `end`, in order: the rows of the segment that ends there, or the last of them if it was trimmed.
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        # Of keys and of values, for the last tokens before the segment that went backward last.
        self._gradients: Sequence[Tensor] | None = None

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> Seen:
        """Store the keys and values [n, b, g, d] of the n tokens of a segment; again, where recomputation runs its
        forward twice.

        Returns them with those of the window before. To be called where autograd does not record.
        """
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
        self, start: int, end: int, own: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """As KVCache does; `prefix` are the gradients of the window before the segment, which is forgotten."""
        del self._rows[end]
        assert next(reversed(self._rows), 0) == start, "segments went backward out of order"
        left: Sequence[Tensor] = ()
        if self._gradients is not None:
            for grad, of_later in zip(own, self._gradients, strict=True):
                _last(grad, of_later.shape[0]).add_(_last(of_later, grad.shape[0]))
            left = [of_later[: max(0, of_later.shape[0] - end + start)] for of_later in self._gradients]
        self._gradients = None if prefix is None else _sums(prefix, left)
        return own

    def _between(self, first: int, end: int) -> Seen:
        """The rows of the tokens from `first` to `end`, segment by segment."""
        of_segments = [
            [_last(x, stop - first) for x in rows]
            for stop, rows in self._rows.items()
            if stop == end or first < stop < end
        ]
        return Seen(*zip(*of_segments, strict=True))


def _sums(prefix: Sequence[Tensor], left: Sequence[Tensor]) -> Sequence[Tensor]:
    """`prefix` in at least fp32, with what later segments left for the last of its tokens."""
    # Copies, since kernels return the gradients of a window as a part of those of all keys that the segment sees.
    sums = [grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True) for grad in prefix]
    for grad, of_later in zip(sums, left, strict=bool(left)):
        _last(grad, of_later.shape[0]).add_(of_later)
    return sums


def _last(tensor: Tensor, rows: int) -> Tensor:
    """The last rows of a tensor, all of them if it has fewer; a view costs the host as much as a small kernel."""
    return tensor if rows >= tensor.shape[0] else tensor[tensor.shape[0] - rows :]
