"""Context parallelism by heads: around attention, tokens are exchanged for heads (DeepSpeed Ulysses, arXiv 2309.14509).

A context-parallel rank holds its share of the tokens of every segment, with all heads; for attention all keys and
values of the segment, with its share of the heads. Its cache keeps those, so earlier segments never travel again. If
there are more ranks than heads to share, some ranks have the same heads and a part of the queries each.
"""

from collections.abc import Sequence
from math import lcm

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from ..context_parts import Run, parts_of_rank


class HeadExchange:
    """The all-to-alls of one attention layer over the c ranks of `group`, in rows of `row_size` (a) ranks.

    Rank r holds two of 2c equal parts of a segment, as Megatron cuts it (context_parts.py). The ranks of a row share
    heads, and attend with the queries of their row to the keys of all rows. One row of all ranks is DeepSpeed Ulysses;
    rows of one rank gather all keys and values. A KV head is sent to all ranks whose query heads read it.

    A rank sends n/c · b · d · e · (2h·(a−1) + 2·lcm(g, a)·(c−1)) / a bytes in the forward, and as many in the backward,
    for n tokens of b sequences, with h query and g KV heads of size d and e bytes an element.
    """

    def __init__(self, group: dist.ProcessGroup, row_size: int) -> None:
        self._group = group
        self._size = group.size()
        self._row_size = row_size
        assert self._size % row_size == 0, f"{self._size} ranks in rows of {row_size}"

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From this rank's tokens with all heads, query [n/c, b, h, d], key and value [n/c, b, g, d], to this rank's
        heads: the queries of its row [n·a/c, b, h/a, d], and all keys and values [n, b, g/a, d]."""
        copies = lcm(key.shape[2], self._row_size) // key.shape[2]
        if copies > 1:
            key = key.repeat_interleave(copies, dim=2)
            value = value.repeat_interleave(copies, dim=2)
        queries = self._by_share(query)
        keys = self._by_share(key)
        values = self._by_share(value)
        keys_and_values = torch.cat((keys, values), dim=-1)
        of_keys = keys_and_values[0].numel()
        of_queries = queries[0].numel()
        row = self._row()
        # To every rank go the keys and values of its heads, to those of this row the queries, too.
        sent = []
        sizes = []
        for rank in range(self._size):
            share = rank % self._row_size
            sent.append(keys_and_values[share].flatten())
            size = of_keys
            if rank in row:
                sent.append(queries[share].flatten())
                size += of_queries
            sizes.append(size)
        arrived = all_to_all(self._group, torch.cat(sent), sizes, sizes).split(sizes)
        own_queries = _in_order([arrived[rank][of_keys:].view(queries.shape[1:]) for rank in row])
        own_keys_and_values = _in_order([part[:of_keys].view(keys_and_values.shape[1:]) for part in arrived])
        own_keys, own_values = own_keys_and_values.split((keys.shape[-1], values.shape[-1]), dim=-1)
        return (
            own_queries.unflatten(-1, (-1, query.shape[-1])),
            own_keys.unflatten(-1, (-1, key.shape[-1])),
            own_values.unflatten(-1, (-1, value.shape[-1])),
        )

    def to_tokens(self, output: Tensor) -> Tensor:
        """The way back: from its row's tokens with its heads, [n·a/c, b, h/a·d], to its own tokens, [n/c, b, h·d]."""
        # Of 2a parts of the row's tokens, the r-th rank of the row has the r-th and the (2a−1−r)-th.
        parts = output.chunk(2 * self._row_size)
        sent_parts = []
        for rank in range(self._row_size):
            sent_parts += [parts[rank], parts[-1 - rank]]
        sent = torch.cat(sent_parts)
        row = self._row()
        of_rank = len(output) // self._row_size
        sizes = [of_rank if rank in row else 0 for rank in range(self._size)]
        arrived = all_to_all(self._group, sent, sizes, sizes)
        return arrived.unflatten(0, (self._row_size, -1)).movedim(0, 2).flatten(2)

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """This rank's part of a tensor [h] with an element for each query head."""
        return of_heads.unflatten(0, (self._row_size, -1))[self._group.rank() % self._row_size]

    def own_queries(self, length: int) -> tuple[Run, ...]:
        """The runs of queries of this rank's row in a segment of `length` tokens."""
        rows = self._size // self._row_size
        if rows == 1:
            return ((0, length),)
        return parts_of_rank((0, length), self._group.rank() // self._row_size, rows)

    def _by_share(self, tensor: Tensor) -> Tensor:
        """The heads of [n/c, b, h, d] divided among the ranks of a row: [a, n/c, b, h/a·d]."""
        return tensor.unflatten(2, (self._row_size, -1)).flatten(3).movedim(2, 0)

    def _row(self) -> range:
        """The ranks that share the heads with this one."""
        first = self._group.rank() // self._row_size * self._row_size
        return range(first, first + self._row_size)


def _in_order(of_ranks: Sequence[Tensor]) -> Tensor:
    """The tokens of consecutive ranks in the order of the sequence: first parts, then second parts reversed."""
    halves = [tensor.chunk(2) for tensor in of_ranks]
    firsts = [first for first, _ in halves]
    seconds = [second for _, second in halves]
    return torch.cat([*firsts, *reversed(seconds)])
