"""Attention as plain matrix products, for any device, type, head size and dropout.

Tested in model/test_kernels.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import AttentionRule, Gradients, Saved

_FEWEST_ROWS = 128  # of a block within a smaller window, so that products are not too small


@dataclass(frozen=True)
class Unfused:
    """Computes blocks of queries, with about `scores_at_once` scores in memory, in at least fp32. It saves the
    log-sum-exp and the state of the random generator if that draws; the backward computes weights and masks again."""

    rule: AttentionRule
    scores_at_once: int = 2**24

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = (_by_group(x, key.shape[2]) for x in (query, key, value))
        generator = default_generator(query.device)
        state = (generator.get_state(),) if self.rule.dropout else ()
        outputs = []
        logsumexps = []
        for rows, keys in self._blocks(q, key.shape[0]):
            scores = _scores(q[..., rows, :], k[..., keys, :], self.rule)
            logsumexps.append(scores.logsumexp(-1))
            weights = scores.sub_(logsumexps[-1].unsqueeze(-1)).exp_()
            outputs.append((self._dropped(weights, generator)[0] @ v[..., keys, :]).to(query.dtype))
        output = _by_token(torch.cat(outputs, -2)).contiguous()
        return output, (torch.cat(logsumexps, -1), *state)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        logsumexp, *state = saved.statistics
        query = saved.query
        num_groups = saved.key.shape[2]
        q, k, v = (_by_group(x, num_groups) for x in (query, saved.key, saved.value))
        o, grad = (_by_group(x, num_groups) for x in (saved.output, grad_output))
        generator = None
        if state:
            (state_in_forward,) = state
            generator = torch.Generator(default_generator(query.device).device)
            generator.set_state(state_in_forward)
        # Σ weight · its gradient over the keys of a query, with dropout, too.
        expected = (o * grad).sum(-1, keepdim=True)
        grad_queries = []
        grad_key = torch.zeros_like(k)
        grad_value = torch.zeros_like(v)
        for rows, keys in self._blocks(q, saved.key.shape[0]):
            q_rows = q[..., rows, :]
            k_seen = k[..., keys, :]
            grad_rows = grad[..., rows, :]
            weights = _scores(q_rows, k_seen, self.rule).sub_(logsumexp[..., rows, None]).exp_()
            kept, mask = self._dropped(weights, generator)
            grad_value[..., keys, :] += (kept.mT @ grad_rows).sum(2, True)
            grad_weights = grad_rows @ v[..., keys, :].mT
            grad_weights = grad_weights if mask is None else grad_weights * mask
            grad_scores = grad_weights.sub_(expected[..., rows, :]).mul_(weights).mul_(self.rule.scale)
            grad_queries.append(grad_scores @ k_seen)
            grad_key[..., keys, :] += (grad_scores.mT @ q_rows).sum(2, True)
        grads = torch.cat(grad_queries, -2), grad_key, grad_value
        return Gradients(*(_by_token(grad).to(query.dtype) for grad in grads))

    def _blocks(self, q: Tensor, num_keys: int) -> Iterator[tuple[slice, slice]]:
        """The rows of queries of each block, and the keys that they see; equal for equal shapes."""
        batch, groups, heads, length, _ = q.shape
        window = num_keys if self.rule.window is None else self.rule.window
        rows = max(1, self.scores_at_once // (batch * groups * heads * min(num_keys, 2 * window + 1)))
        # Larger blocks would compute scores that a window hides.
        rows = min(rows, max(window, _FEWEST_ROWS))
        for first in range(0, length, rows):
            end = min(first + rows, length)
            own = num_keys - length  # the key of the first query's own token
            yield slice(first, end), slice(max(0, own + first - window), own + end)

    def _dropped(self, weights: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        """The weights of a block after dropout, and their factors: 0 for dropped ones, 1 / (1 − dropout) for others."""
        if not self.rule.dropout:
            return weights, None
        keep = 1.0 - self.rule.dropout
        mask = torch.empty_like(weights).bernoulli_(keep, generator=generator).div_(keep)
        return weights * mask, mask


def default_generator(device: torch.device) -> torch.Generator:
    """The random generator of kernels on `device`."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _scores(q: Tensor, k: Tensor, rule: AttentionRule) -> Tensor:
    """Scores [b, g, h/g, rows, keys], causal: the last row sees the last key."""
    scores = (q @ k.mT).mul_(rule.scale)
    rows, keys = scores.shape[-2:]
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    scores[..., keys - rows :].masked_fill_(hidden, float("-inf"))
    if rule.window is not None:
        before = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows - rule.window - 1)
        scores.masked_fill_(before, float("-inf"))
    return scores


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[s, b, h, d] to [b, g, h/g, s, d], in the type of the computation."""
    x = x.unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_token(x: Tensor) -> Tensor:
    """[b, g, h/g, s, d] to [s, b, h, d]."""
    return x.permute(3, 0, 1, 2, 4).flatten(2, 3)
