"""The tokens of a micro-batch on the ranks of a context-parallel group: as a program divides them, and by segments.

A program gives every rank its share of whole sequences, or of each document of a pack; a segment needs the share of its
own tokens. Both are two parts of each run of tokens (model/context_parts.py). What the model gets is gathered once a
call, numbers for each token; what it returns goes back to the ranks that the program expects it on, row by row.

Tested in functional_tests/test_programs.py by test_a_program_trains_as_with_whole_sequences.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...model import Run, Segment, parts_of_rank
from .call_arguments import Arguments, bounds_of, holds_no_tensors, size_of, token_dimensions

Runs = Sequence[Run]


def positions_of(runs: Runs, rank: int, size: int) -> np.ndarray:
    """The positions of the tokens of one rank, where each run of tokens is divided among `size` ranks."""
    parts = [parts_of_rank(run, rank, size) for run in runs]
    return np.concatenate([np.arange(start, end) for of_run in parts for start, end in of_run])


class ContextShares:
    """The two divisions of one micro-batch among the ranks of `group`: of the `runs` of the program, each of which is a
    sequence or a document, and of its segments."""

    def __init__(self, group: dist.ProcessGroup, runs: Runs, device: torch.device) -> None:
        self._group = group
        self._size = group.size()
        self._device = device
        for start, end in runs:
            if (end - start) % (2 * self._size):
                raise ValueError(
                    f"{end - start} tokens cannot be divided into the {2 * self._size} parts that context parallelism "
                    f"needs; pad sequences or documents to a multiple of {2 * self._size}"
                )
        self._of_program = [positions_of(runs, rank, self._size) for rank in range(self._size)]
        self.num_own = len(self._of_program[group.rank()])  # tokens of each sequence on this rank
        self._order = np.argsort(np.concatenate(self._of_program))

    def gathered(self, own: Tensor, dimension: int) -> Tensor:
        """The tokens of all ranks in order, of this rank's share along a dimension; gradients go back."""
        rows: Tensor = _GatheredRows.apply(own.movedim(dimension, 0), self._group)
        return rows.index_select(0, self._index(self._order)).movedim(0, dimension)

    def part(self, whole: Tensor, dimension: int, segment: Segment) -> Tensor:
        """This rank's share of a segment along a dimension of a gathered tensor."""
        own = positions_of([(segment.start, segment.end)], self._group.rank(), self._size)
        return whole.index_select(dimension, self._index(own))

    def rearranged(self, own: Tensor, dimension: int, segments: Sequence[Segment]) -> Tensor:
        """The program's share, of this rank's shares of all segments one after the other; gradients go back."""
        runs = [(segment.start, segment.end) for segment in segments]
        by_segments = [positions_of(runs, rank, self._size) for rank in range(self._size)]
        rank = self._group.rank()
        order, counts = _by_peer(by_segments[rank], _holders(self._of_program))
        arriving, arriving_counts = _by_peer(self._of_program[rank], _holders(by_segments))
        rows = own.movedim(dimension, 0).index_select(0, self._index(order))
        arrived = all_to_all(self._group, rows, arriving_counts, counts)
        places = np.argsort(arriving)  # of what arrives, in the order of the program
        rearranged = arrived.index_select(0, self._index(places)).movedim(0, dimension)
        return rearranged.contiguous()  # programs view it

    def _index(self, positions: np.ndarray) -> Tensor:
        return torch.from_numpy(positions).to(self._device, non_blocking=True)


class _GatheredRows(torch.autograd.Function):
    """The rows of all ranks of a group. Every rank computes with some of them, so the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def _holders(shares: Sequence[np.ndarray]) -> np.ndarray:
    """The rank that holds each position of a sequence, from the positions on each rank."""
    holders = np.empty(sum(map(len, shares)), dtype=np.int64)
    for rank, positions in enumerate(shares):
        holders[positions] = rank
    return holders


def _by_peer(positions: np.ndarray, peers: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The order in which rows at these positions are exchanged, and the number for each peer. The rows of a peer are in
    ascending order of their positions, so that both sides know which is which."""
    peer = peers[positions]
    order = np.argsort(peer * len(peers) + positions)
    return order, np.bincount(peer, minlength=int(peers.max()) + 1).tolist()


def whole_arguments(
    arguments: Arguments, group: dist.ProcessGroup, by_document: bool, device: torch.device
) -> tuple[Arguments, ContextShares | None]:
    """The arguments of a call with the tokens of all ranks, in order, and how the program divided them: by the
    documents of a pack if `by_document`. A call without data has no shares. A collective of the group."""
    named = arguments.by_name()
    size = size_of(arguments)
    if size is None:
        return arguments, None
    number, length = size
    packed = named.get("packed_seq_params")
    tokens = named.get("input_ids")
    is_packed = isinstance(packed, PackedSeqParams)
    has_tokens = isinstance(tokens, Tensor) and not tokens.is_nested
    if has_tokens or not is_packed:
        length *= group.size()  # the call has this rank's share; a pack without tokens says where the whole ends
    runs = [(0, length)]
    if is_packed and by_document:
        runs = list(pairwise(sorted({*bounds_of(packed), length})))
    shares = ContextShares(group, runs, device)
    leaves, tree = tree_flatten((arguments.positional, arguments.named), holds_no_tensors)
    for place, leaf in enumerate(leaves):
        dimensions = token_dimensions(leaf, number, length // group.size())
        if dimensions:
            leaves[place] = shares.gathered(leaf, dimensions[0])
    positional, options = tree_unflatten(leaves, tree)
    return Arguments(positional, options, arguments.names), shares
