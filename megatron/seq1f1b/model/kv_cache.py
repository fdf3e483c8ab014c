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
        # Of keys and of values, for tokens before the segment that went backward last.
        self._gradients: Sequence[Tensor] | None = None

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values [end − start, b, g, d] of a segment."""
        self._keys[start:end].copy_(key.detach())
        self._values[start:end].copy_(value.detach())

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [p + end − start, b, g, d] of a segment and the p tokens of the prefix that it sees, as
        views."""
        seen = slice(self._first(start), end)
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
        if is_last_segment:
            left = [grad[:0] for grad in own]
        else:
            # Later segments have left something for the last tokens before `end`, of this segment and before it.
            first = self._first(end)
            for grad, of_later in zip(own, self._gradients, strict=True):
                grad[max(0, first - start) :] += of_later[max(0, start - first) :]
            left = [of_later[: max(0, start - first)] for of_later in self._gradients]
        self._gradients = self._added(prefix, left) if prefix is not None else left
        return own

    def _added(self, prefix: Sequence[Tensor], left: Sequence[Tensor]) -> Sequence[Tensor]:
        """`prefix`, with what later segments left for the last of its tokens; in place where they left something for
        all of them."""
        if left[0].shape[0] == prefix[0].shape[0]:
            for of_later, grad in zip(left, prefix, strict=True):
                of_later += grad
            return left
        dtype = torch.promote_types(self._keys.dtype, torch.float32)
        # Part of a buffer with the segment's own gradients, which are many beside those of a window.
        is_window = self._window < self._keys.shape[0]
        sums = [grad.to(dtype, copy=is_window) for grad in prefix]
        for grad, of_later in zip(sums, left, strict=True):
            grad[grad.shape[0] - of_later.shape[0] :] += of_later
        return sums

    def _first(self, start: int) -> int:
        """The first token that a segment from `start` on sees."""
        return max(0, start - self._window)
