"""All documents of a segment in one call, for kernels that can."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..documents import Documents, pieces
from .interface import CumulativeLengths, Gradients, PackedKernel, Saved


@dataclass(frozen=True)
class DocumentsPacked:
    """Hands `kernel` the sequences one after the other, each without the keys that its segment does not see.

    With one sequence in a micro-batch nothing is copied.
    """

    kernel: PackedKernel
    documents: Documents

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        start = key.shape[0] - query.shape[0]
        lengths = self._cumulative_lengths(start, key.shape[0], query.device)
        keys, values = (self._seen(x, start) for x in (key, value))
        output, statistics = self.kernel.forward_packed(_joined(query), keys, values, lengths)
        return self._apart(output).flatten(2).contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        start = saved.start
        lengths = self._cumulative_lengths(start, key.shape[0], query.device)
        grad_output, output = (_joined(x.reshape(query.shape)) for x in (grad_output, output))
        packed = Saved(_joined(query), self._seen(key, start), self._seen(value, start), output, statistics)
        grad_query, *grads = self.kernel.backward_packed(grad_output, packed, lengths)
        # Keys of earlier segments whose documents have ended there get no gradient.
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for whole, found in zip((grad_key, grad_value), grads, strict=True):
            ends = accumulate(rows.shape[0] for rows in self._rows(whole, start))
            for rows, end in zip(self._rows(whole, start), ends, strict=True):
                rows.copy_(found[end - rows.shape[0] : end])
        return Gradients.of_all_keys(self._apart(grad_query), grad_key, grad_value)

    def _cumulative_lengths(self, start: int, end: int, device: torch.device) -> CumulativeLengths:
        found = [piece for starts in self.documents for piece in pieces(starts, start, end)]
        queries = [piece.end - piece.start for piece in found]
        keys = [piece.end - piece.first_key for piece in found]
        ends = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(keys)]], dtype=torch.int32)
        if device.type == "cuda":  # from pinned memory the host need not wait for the copy
            ends = ends.pin_memory().to(device, non_blocking=True)
        return CumulativeLengths(ends[0], ends[1], max(queries), max(keys))

    def _rows(self, x: Tensor, start: int) -> Iterator[Tensor]:
        """Of [m, b, g, d] the rows [u, g, d] that the segment sees of each sequence, as views."""
        for sequence, starts in enumerate(self.documents):
            yield x[pieces(starts, start, x.shape[0])[0].first_key :, sequence]

    def _seen(self, x: Tensor, start: int) -> Tensor:
        rows = list(self._rows(x, start))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _apart(self, x: Tensor) -> Tensor:
        """[b·n, h, d] to [n, b, h, d]."""
        return x.unflatten(0, (len(self.documents), -1)).transpose(0, 1)


def _joined(x: Tensor) -> Tensor:
    """[n, b, h, d] to [b·n, h, d]."""
    return x.transpose(0, 1).flatten(0, 1)
