"""PyTorch's CPU flash attention within a sliding window: block by block of queries, each with the keys that it sees."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cpu import flash, flash_backward, heads_first
from .interface import AttentionRule, Gradients, Saved

# Rows of a block, unless the window is larger: fewer would leave the operator without work.
_FEWEST_ROWS = 128


@dataclass(frozen=True)
class CpuWindow:
    """As CpuFlash; the work per query is at most three windows."""

    rule: AttentionRule

    def __post_init__(self) -> None:
        assert self.rule.dropout == 0 and self.rule.window is not None, "the operator has no dropout"

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = (heads_first(x) for x in (query, key, value))
        found = [
            flash(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, False, attn_mask=mask, scale=self.rule.scale)
            for rows, keys, mask in self._blocks(query, key.shape[0])
        ]
        outputs, logsumexps = zip(*found, strict=True)
        output = torch.cat(outputs, 2).permute(2, 0, 1, 3).flatten(2).contiguous()
        return output, (torch.cat(logsumexps, 2),)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        (logsumexp,) = saved.statistics
        q, k, v, o, grad = (
            heads_first(x) for x in (*saved[:3], *(x.reshape(saved.query.shape) for x in (saved.output, grad_output)))
        )
        sums = torch.promote_types(k.dtype, torch.float32)
        grad_query, grad_key, grad_value = torch.empty_like(q), *(torch.zeros_like(x, dtype=sums) for x in (k, v))
        for rows, keys, mask in self._blocks(saved.query, saved.key.shape[0]):
            tensors = grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows]
            of_block = flash_backward(
                *tensors, logsumexp[:, :, rows], 0.0, False, attn_mask=mask, scale=self.rule.scale
            )
            grad_query[:, :, rows] = of_block[0]
            grad_key[:, :, keys] += of_block[1]
            grad_value[:, :, keys] += of_block[2]
        grads = grad_query, grad_key.to(k.dtype), grad_value.to(v.dtype)
        return Gradients.of_all_keys(*(x.permute(2, 0, 1, 3) for x in grads))

    def _blocks(self, query: Tensor, num_keys: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Rows of queries, the keys that they see, and what is added to their scores, of one block after the other."""
        window, num_queries = self.rule.window, query.shape[0]
        start, size = num_keys - num_queries, max(window, _FEWEST_ROWS)
        for first in range(0, num_queries, size):
            end = min(first + size, num_queries)
            first_key = max(0, start + first - window)
            # The key of a query's own token, seen from the first key of the block, lies on this diagonal.
            own = start + first - first_key
            seen = torch.ones(end - first, start + end - first_key, dtype=torch.bool).tril(own).triu(own - window)
            mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
            yield slice(first, end), slice(first_key, start + end), mask
