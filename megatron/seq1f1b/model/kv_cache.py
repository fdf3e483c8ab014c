"""Keys and values of one layer and one micro-batch, and the gradients that later segments leave for earlier ones.

Later segments attend to earlier ones, so in the backward, which visits the segments in reverse, every segment adds to
the gradients of all keys and values before it. Seq1F1B (arXiv 2406.03488, section 3.2) calls for that accumulation;
here it happens in place, in one buffer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Seen(NamedTuple):
    """The keys and values that a segment sees, its own the last, as parts [n, b, g, d] one after the other."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Keys and values [m, b, g, d]; a part that is alone is not copied."""
        if len(self.keys) == 1:
            return self.keys[0], self.values[0]
        return torch.cat(self.keys), torch.cat(self.values)


class KVCache:
    """Preallocated keys and values, each [S, b, g, d] for S tokens, b sequences, g KV heads of size d.

    Bytes per token and layer, with e bytes an element: 2·b·g·d·e from the first forward of the micro-batch to its last
    backward, and 2·b·g·d·max(e, 4) more for the gradients from its first backward to its last. Nothing is copied or
    concatenated as segments are added. Writes are idempotent, since recomputation runs a forward twice.
    """

    def __init__(self, sequence_length: int, key: Tensor, value: Tensor) -> None:
        self._keys = key.new_empty((sequence_length, *key.shape[1:]))
        self._values = value.new_empty((sequence_length, *value.shape[1:]))
        # Of keys and of values, for tokens before the segment that went backward last; empty if there are none.
        self._gradients: Sequence[Tensor] | None = None

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> Seen:
        """Store the keys and values [n, b, g, d] of the n tokens of a segment.

        Returns those of the segment and its prefix, as views. To be called where autograd does not record.
        """
        self._keys[start:end].copy_(key)
        self._values[start:end].copy_(value)
        return Seen((self._keys[:end],), (self._values[:end],))

    def exchange_gradients(
        self, start: int, end: int, own: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Leave gradients for earlier segments, take those that later segments left for this one.

        `own` are the gradients [end − start, b, g, d] of the segment's keys and values by its own queries, `prefix`
        those [start, b, g, d] of the tokens before it. Returns the complete gradients of the segment. Sums are kept in
        at least fp32: rounding to 16 bits once per segment would make the error grow with the number of segments.
        """
        is_last_segment = end == self._keys.shape[0]
        assert (self._gradients is None) == is_last_segment, "segments went backward out of order"
        prefix = prefix or ()
        if self._gradients is None:
            dtype = torch.promote_types(self._keys.dtype, torch.float32)
            self._gradients = [grad.to(dtype) for grad in prefix]
            return own
        for grad, of_later in zip(own, self._gradients, strict=True):
            grad += of_later[start:]
        self._gradients = [of_later[:start] for of_later in self._gradients] if start else ()
        for of_later, grad in zip(self._gradients, prefix, strict=True):
            of_later += grad
        return own
