"""Context parallelism by heads: around attention, tokens are exchanged for heads (DeepSpeed Ulysses, arXiv 2309.14509).

A context-parallel rank holds its share of the tokens of every segment, with all heads. Around attention it holds all
tokens of the segment, with its share of the heads: so its cache holds the keys and values of these heads, and those of
earlier segments never travel again.
"""

from math import lcm

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


class HeadExchange:
    """The all-to-alls of one attention layer over the c ranks of `group`.

    Rank r holds the r-th and the (2c−1−r)-th of 2c equal parts of a segment, as Megatron's
    `get_batch_on_this_cp_rank` cuts it, so that n is a multiple of 2c. Where c does not divide the KV heads, each is
    sent to all ranks whose query heads read it.

    Bytes that a rank sends for n tokens of b sequences, with h query and g KV heads of size d and e bytes an element,
    in the forward, and the same in the backward: (c−1)/c · n/c · b · (2h + 2·lcm(g, c)) · d · e.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = group.size()

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of a segment with this rank's heads, [n, b, h/c, d], from its own with all heads [n/c, b, h, d].

        In one message, for which heads are laid side by side.
        """
        copies = lcm(key.shape[2], self._size) // key.shape[2]
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
        shares = [tensor.unflatten(2, (self._size, -1)).flatten(3).movedim(2, 0) for tensor in (query, key, value)]
        sizes = [share.shape[-1] for share in shares]
        arrived = all_to_all(self._group, torch.cat(shares, dim=-1))
        first, second = arrived.unflatten(1, (2, -1)).unbind(1)  # of every rank, its two parts
        tokens = torch.cat((first, second.flip(0))).flatten(0, 1)
        heads = zip(tokens.split(sizes, dim=-1), (query, key, value), strict=True)
        return tuple(part.unflatten(-1, (-1, whole.shape[-1])) for part, whole in heads)

    def to_tokens(self, output: Tensor) -> Tensor:
        """This rank's tokens with all heads, [n/c, b, h·d], from all tokens with its heads [n, b, h/c·d]."""
        first, second = output.unflatten(0, (2, self._size, -1)).unbind(0)
        sent = torch.stack((first, second.flip(0)), dim=1).flatten(1, 2)
        return all_to_all(self._group, sent).movedim(0, 2).flatten(2)

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """This rank's part of a tensor [h] with an element for each query head."""
        return of_heads.unflatten(0, (self._size, -1))[self._group.rank()]
