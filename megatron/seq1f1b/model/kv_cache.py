"""Keys and values of one layer and one micro-batch, and the gradients that later segments leave for earlier ones.

Later segments attend to earlier ones, so in the backward, which visits the segments in reverse, every segment adds to
the gradients of all keys and values before it. Seq1F1B (arXiv 2406.03488, section 3.2) calls for that accumulation;
here it happens in place, in one buffer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values, each [S, b, g, d] for S tokens, b sequences, g KV heads of size d.

    Bytes per token and layer, with e bytes an element: 2·b·g·d·e from the first forward of the micro-batch to its last
    backward, and 2·b·g·d·max(e, 4) more for the gradients from its first backward to its last. Nothing is copied or
    concatenated as segments are added. Writes are idempotent, since recomputation runs a forward twice.

    Where a query sees at most `window` keys before its own, a segment reads that many keys of the prefix, and the
    gradients take the bytes of a window, not of the prefix.
    """

    def __init__(self, sequence_length: int, key: Tensor, value: Tensor, window: int | None = None) -> None:
        self._window = sequence_length if window is None else window
        self._keys = key.new_empty((sequence_length, *key.shape[1:]))
        self._values = value.new_empty((sequence_length, *value.shape[1:]))
        # Of keys and of values, for tokens before the segment that went backward last; empty if there are none.
        self._gradients: Sequence[Tensor] | None = None

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values [n, b, g, d] of the n tokens of a segment.

        Returns those [p + n, b, g, d] of the segment and of the p tokens of the prefix that it sees, as views. To be
        called where autograd does not record.
        """
        own, seen = slice(start, end), slice(self._first(start), end)
        self._keys[own].copy_(key)
        self._values[own].copy_(value)
        return self._keys[seen], self._values[seen]

    def exchange_gradients(
        self, start: int, end: int, own: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Leave gradients for earlier segments, take those that later segments left for this one.

        `own` are the gradients [end − start, b, g, d] of the segment's keys and values by its own queries, `prefix`
        those [p, b, g, d] of the tokens before it that it sees. Returns the complete gradients of the segment. Sums are
        kept in at least fp32: rounding to 16 bits once per segment would make the error grow with the number of
        segments.
        """
        is_last_segment = end == self._keys.shape[0]
        assert (self._gradients is None) == is_last_segment, "segments went backward out of order"
        left: list[Tensor] = []
        if self._gradients:
            # Later segments have left something for the last tokens before `end`, of this segment and before it.
            first = self._first(end)
            for grad, of_later in zip(own, self._gradients, strict=True):
                _from(grad, first - start).add_(_from(of_later, start - first))
            if start > first:
                left = [of_later[: start - first] for of_later in self._gradients]
        self._gradients = left if prefix is None else self._added(prefix, left)
        return own

    def _added(self, prefix: Sequence[Tensor], left: Sequence[Tensor]) -> Sequence[Tensor]:
        """`prefix`, with what later segments left for the last of its tokens; in place where they left something for
        all of them."""
        if left and left[0].shape[0] == prefix[0].shape[0]:
            for of_later, grad in zip(left, prefix, strict=True):
                of_later += grad
            return left
        dtype = torch.promote_types(self._keys.dtype, torch.float32)
        # Part of a buffer with the segment's own gradients, which are many beside those of a window.
        is_window = self._window < self._keys.shape[0]
        sums = [grad.to(dtype, copy=is_window) for grad in prefix]
        for grad, of_later in zip(sums, left, strict=bool(left)):
            _from(grad, grad.shape[0] - of_later.shape[0]).add_(of_later)
        return sums

    def _first(self, start: int) -> int:
        """The first token that a segment from `start` on sees."""
        return max(0, start - self._window)


def _from(tensor: Tensor, start: int) -> Tensor:
    """The rows from `start` on; a view costs the host as much as a small kernel."""
    return tensor if start <= 0 else tensor[start:]
