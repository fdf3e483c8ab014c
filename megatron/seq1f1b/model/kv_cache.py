"""Keys and values of one layer and one micro-batch, and the gradients that later segments leave for earlier ones.

Later segments attend to earlier ones, so in the backward, which visits the segments in reverse, every segment adds to
the gradients of all keys and values before it. Seq1F1B (arXiv 2406.03488, section 3.2) calls for that accumulation;
here it happens in place, in one buffer.
"""

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values, each [S, b, g, d] for S tokens, b sequences, g KV heads of size d.

    Bytes per token and layer, with e bytes an element: 2·b·g·d·e from the first forward of the micro-batch to its last
    backward, and 2·b·g·d·max(e, 4) more for the gradients from its first backward to its last. Nothing is copied or
    concatenated as segments are added. Writes are idempotent, since recomputation runs a forward twice.
    """

    def __init__(self, sequence_length: int, key: Tensor, value: Tensor) -> None:
        self._keys = key.new_empty((sequence_length, *key.shape[1:]))
        self._values = value.new_empty((sequence_length, *value.shape[1:]))
        self._key_grads: Tensor | None = None
        self._value_grads: Tensor | None = None

    def write(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values [end − start, b, g, d] of a segment."""
        self._keys[start:end].copy_(key.detach())
        self._values[start:end].copy_(value.detach())

    def read(self, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [end, b, g, d] of all tokens before `end`, as views."""
        return self._keys[:end], self._values[:end]

    def exchange_gradients(
        self, start: int, end: int, own: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Leave gradients for earlier segments, take those that later segments left for this one.

        `own` are the gradients [end − start, b, g, d] of the segment's keys and values by its own queries, `prefix`
        those [start, b, g, d] of all tokens before it. Returns the complete gradients of the segment. Sums are kept in
        at least fp32: rounding to 16 bits once per segment would make the error grow with the number of segments.
        """
        is_last_segment = end == self._keys.shape[0]
        assert (self._key_grads is None) == is_last_segment, "segments went backward out of order"
        if self._key_grads is not None:
            key, value = own
            own = (
                (self._key_grads[start:end] + key).to(key.dtype),
                (self._value_grads[start:end] + value).to(value.dtype),
            )
            if prefix is not None:
                self._key_grads[:start] += prefix[0]
                self._value_grads[:start] += prefix[1]
        elif prefix is not None:
            # The last segment is the first to leave gradients: its buffers become the accumulators.
            dtype = torch.promote_types(self._keys.dtype, torch.float32)
            self._key_grads, self._value_grads = (grad.to(dtype) for grad in prefix)
        return own
