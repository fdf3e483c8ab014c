"""A kernel in several calls, each for some of a segment's queries."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched

import torch
from torch import Tensor

from .interface import Gradients, Kernel, Saved

# What selects tokens of a tensor [n, b, ...], and perhaps sequences.
Index = slice | tuple[slice, ...]


@dataclass(frozen=True)
class InCalls(ABC):
    """Runs `kernel` once for every pair of queries and of keys that end with the last of these queries."""

    kernel: Kernel

    @abstractmethod
    def calls(self, num_queries: int, num_keys: int) -> Iterator[tuple[Index, Index]]:
        """Index of the queries and index of the keys of each call; no two have a query in common."""

    def num_own_keys(self, num_queries: int) -> int:
        """How many of the keys belong to the segment; the others are its prefix."""
        return num_queries

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output = query.new_empty(*query.shape[:2], query.shape[2] * value.shape[3])
        statistics: list[Tensor] = []
        for queries, keys in self.calls(query.shape[0], key.shape[0]):
            output[queries], of_call = self.kernel.forward(query[queries], key[keys], value[keys])
            statistics += of_call
        return output, tuple(statistics)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        # Keys that no call sees get no gradient.
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        grad_sinks: list[Tensor] = []
        calls = list(self.calls(query.shape[0], key.shape[0]))
        by_call = batched(statistics, len(statistics) // len(calls))
        for (queries, keys), of_call in zip(calls, by_call, strict=True):
            part = Saved(query[queries], key[keys], value[keys], output[queries], of_call)
            grads = self.kernel.backward(grad_output[queries], part)
            grad_query[queries] = grads.query
            grad_sinks += [] if grads.sink is None else [grads.sink]
            prefixes = grads.prefix or (None, None)
            for whole, own, prefix in zip((grad_key, grad_value), (grads.key, grads.value), prefixes, strict=True):
                rows = whole[keys]
                rows[part.start :] += own
                if prefix is not None:
                    rows[: part.start] += prefix
        start = key.shape[0] - self.num_own_keys(query.shape[0])
        prefix = (grad_key[:start], grad_value[:start]) if start else None
        grad_sink = torch.stack(grad_sinks).sum(0) if grad_sinks else None
        return Gradients(grad_query, grad_key[start:], grad_value[start:], prefix, grad_sink)
