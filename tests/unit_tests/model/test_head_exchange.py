"""Tokens for heads and back, among ranks that are threads here, and the bytes that they send."""

from concurrent.futures import ThreadPoolExecutor
from math import lcm
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model.attention import head_exchange
from megatron.seq1f1b.model.attention.head_exchange import HeadExchange

TOKENS, SEQUENCES, SIZE = 24, 2, 3


class Ranks:
    """Takes the place of Megatron's all_to_all, and counts the bytes that a rank sends to others."""

    def __init__(self, size: int, row_size: int) -> None:
        self.size, self.row_size = size, row_size
        self.barrier, self.sent, self.bytes = Barrier(size), [None] * size, [0] * size

    def all_to_all(self, group, tensor, arriving, leaving):
        rank = group.rank()
        self.sent[rank] = tensor.split(leaving)
        self.bytes[rank] += sum(part.nbytes for to, part in enumerate(self.sent[rank]) if to != rank)
        self.barrier.wait()
        arrived = [parts[rank] for parts in self.sent]
        assert [len(part) for part in arrived] == arriving
        self.barrier.wait()
        return torch.cat(arrived)

    def run(self, function):
        """The results of `function(exchange, rank)` on all ranks."""
        groups = [SimpleNamespace(size=lambda: self.size, rank=lambda rank=rank: rank) for rank in range(self.size)]
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(lambda group: function(HeadExchange(group, self.row_size), group.rank()), groups))


def share(tensor, rank, size):
    """A rank's share of a segment, as cut by Megatron's get_batch_on_this_cp_rank."""
    parts = tensor.chunk(2 * size)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]))


@pytest.mark.parametrize(
    "size, row_size, heads, kv_heads",
    [(2, 2, 4, 4), (2, 2, 4, 1), (4, 4, 8, 2), (3, 3, 12, 2), (4, 4, 12, 6), (2, 1, 3, 3), (4, 2, 6, 1), (6, 2, 4, 4)],
)
def test_a_rank_receives_its_heads_and_queries_and_returns_them(monkeypatch, size, row_size, heads, kv_heads):
    ranks = Ranks(size, row_size)
    monkeypatch.setattr(head_exchange, "all_to_all", ranks.all_to_all)
    query = torch.randn(TOKENS, SEQUENCES, heads, SIZE)
    key, value = torch.randn(2, TOKENS, SEQUENCES, kv_heads, SIZE)

    def there_and_back(exchange, rank):
        mine = exchange.to_heads(*(share(tensor, rank, size) for tensor in (query, key, value)))
        sinks = exchange.own_heads(torch.arange(heads))
        return *mine, sinks, exchange.to_tokens(mine[0].flatten(2)), exchange.own_queries(TOKENS)

    for rank, (q, k, v, sinks, back, runs) in enumerate(ranks.run(there_and_back)):
        share_of_heads = heads // row_size
        own = range(rank % row_size * share_of_heads, (rank % row_size + 1) * share_of_heads)
        assert sinks.tolist() == [*own]
        assert torch.equal(q, torch.cat([query[start:end, :, own] for start, end in runs]))
        assert sum(end - start for start, end in runs) == TOKENS * row_size // size
        for got, whole in ((k, key), (v, value)):
            read_by_own = [head * kv_heads // heads for head in own]
            assert torch.equal(got.repeat_interleave(len(own) // got.shape[2], dim=2), whole[:, :, read_by_own])
        assert torch.equal(back, share(query, rank, size).flatten(2))
    elements = 2 * heads * (row_size - 1) + 2 * lcm(kv_heads, row_size) * (size - 1)
    expected = TOKENS // size * SEQUENCES * SIZE * elements // row_size * query.itemsize
    assert ranks.bytes == [expected] * size
