"""Tokens for heads and back, among ranks that are threads here, and the bytes that they send."""

from concurrent.futures import ThreadPoolExecutor
from math import lcm
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model import head_exchange
from megatron.seq1f1b.model.head_exchange import HeadExchange

TOKENS, SEQUENCES, SIZE = 24, 2, 3


class Ranks:
    """Takes the place of Megatron's all_to_all, and counts the bytes that a rank sends to others."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.sent, self.bytes = size, Barrier(size), [None] * size, [0] * size

    def all_to_all(self, group, tensor):
        rank = group.rank()
        self.bytes[rank] += tensor.nbytes * (self.size - 1) // self.size
        self.sent[rank] = tensor.chunk(self.size)
        self.barrier.wait()
        arrived = torch.cat([parts[rank] for parts in self.sent])
        self.barrier.wait()
        return arrived

    def run(self, function):
        """What `function(exchange, rank)` gives on each rank."""
        groups = [SimpleNamespace(size=lambda: self.size, rank=lambda rank=rank: rank) for rank in range(self.size)]
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(lambda group: function(HeadExchange(group), group.rank()), groups))


def share(tensor, rank, size):
    """Of a segment, as Megatron's get_batch_on_this_cp_rank cuts it."""
    parts = tensor.chunk(2 * size)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]))


@pytest.mark.parametrize("size, heads, kv_heads", [(2, 4, 4), (2, 4, 1), (4, 8, 2), (3, 12, 2), (4, 12, 6)])
def test_a_rank_gets_all_tokens_of_its_heads_and_gives_them_back(monkeypatch, size, heads, kv_heads):
    ranks = Ranks(size)
    monkeypatch.setattr(head_exchange, "all_to_all", ranks.all_to_all)
    query = torch.randn(TOKENS, SEQUENCES, heads, SIZE)
    key, value = torch.randn(2, TOKENS, SEQUENCES, kv_heads, SIZE)

    def there_and_back(exchange, rank):
        mine = exchange.to_heads(*(share(tensor, rank, size) for tensor in (query, key, value)))
        return *mine, exchange.to_tokens(mine[0].flatten(2))

    for rank, (q, k, v, back) in enumerate(ranks.run(there_and_back)):
        own = range(rank * heads // size, (rank + 1) * heads // size)
        assert torch.equal(q, query[:, :, own])
        for got, whole in ((k, key), (v, value)):
            read_by_own = [head * kv_heads // heads for head in own]
            assert torch.equal(got.repeat_interleave(len(own) // got.shape[2], dim=2), whole[:, :, read_by_own])
        assert torch.equal(back, share(query, rank, size).flatten(2))
    expected = (2 * heads + 2 * lcm(kv_heads, size)) * SIZE * 4 * SEQUENCES * TOKENS // size * (size - 1) // size
    assert ranks.bytes == [expected] * size


def test_a_rank_has_the_sinks_of_its_heads():
    assert [part.tolist() for part in Ranks(2).run(lambda exchange, _: exchange.own_heads(torch.arange(4)))] == [
        [0, 1],
        [2, 3],
    ]
