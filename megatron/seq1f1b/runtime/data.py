"""The data of a step, handed out by segments."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path

from ..model import Segment


class SegmentIterator:
    """Replaces the data iterator of one model chunk during one step; `next()` returns the running segment.

    Batches are read once and in order, as a micro-batch number must mean the same batch on every stage, and kept until
    their last segment. `check(mask, where)` is called for every attention mask, booleans [..., s, s].
    """

    def __init__(self, batches: Iterator[Any], check: Callable[[torch.Tensor, str], None] | None = None) -> None:
        self._batches = batches
        self._check = check
        self._kept: dict[int, Any] = {}
        self._read = 0
        self.segment: Segment | None = None  # of the coming or the last `next()`
        self.latest: Any = None  # the whole batch of the segment that `next()` returned last

    def at(self, segment: Segment) -> "SegmentIterator":
        """Make `next()` return this segment."""
        self.segment = segment
        return self

    def __iter__(self) -> "SegmentIterator":
        return self

    def __next__(self) -> Any:
        segment = self.segment
        self._read_to(segment.microbatch + 1)
        batch = self._kept.pop(segment.microbatch) if segment.is_last else self._kept[segment.microbatch]
        self.latest = batch
        if segment.is_whole_sequence:
            self.latest = tree_map(lambda leaf: leaf, batch)  # Megatron cuts a batch in place for context parallelism
            return batch
        if segment.is_first:
            _require_sequences(batch, segment)
        return tree_map_with_path(lambda path, leaf: cut(leaf, segment, keystr(path)), batch)

    def read_ahead(self, num_microbatches: int) -> list[Any]:
        """The whole batches of a step that is about to begin."""
        self._read_to(num_microbatches)
        return [self._kept[microbatch] for microbatch in range(num_microbatches)]

    def _read_to(self, num_microbatches: int) -> None:
        while self._read < num_microbatches:
            batch = self._kept[self._read] = next(self._batches)
            for leaf in tree_leaves(batch) if self._check else ():
                square = (self.segment.sequence_length,) * 2
                if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool and leaf.shape[-2:] == square:
                    self._check(leaf, f"the attention mask in the batch of micro-batch {self._read}")
            self._read += 1


def _require_sequences(batch: Any, segment: Segment) -> None:
    """Raise ValueError for a batch with nothing to cut but integers [x, y] that look like tokens. A program may cut
    activations itself."""
    length = segment.sequence_length
    leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, torch.Tensor)]
    long = [(name, leaf) for name, leaf in leaves if leaf.dim() == 2 and leaf.numel() >= length]
    tokens = [f"{name} {list(leaf.shape)}" for name, leaf in long if leaf.dtype in (torch.int32, torch.int64)]
    if tokens and not any(length in leaf.shape[1:] for _, leaf in leaves):
        raise ValueError(
            f"no tensor of micro-batch {segment.microbatch} has sequences of {length} tokens to cut: "
            f"{', '.join(tokens)}; yield tensors [sequences, {length}, ...], or drop --sequence-splits"
        )


def cut(leaf: Any, segment: Segment, name: str = "") -> Any:
    """The part of a batch entry that belongs to `segment`.

    Every dimension as long as a sequence is narrowed, except for the first, which counts sequences. Positions where
    documents start (`cu_seqlens`) become positions in the segment. Anything else stays as it is.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if "cu_seqlens" in name:
        return (leaf - segment.start).clamp(0, segment.length)
    for dimension in range(1, leaf.dim()):
        if leaf.shape[dimension] == segment.sequence_length:
            leaf = leaf.narrow(dimension, segment.start, segment.length)
    if leaf.is_contiguous() or not leaf.is_pinned():
        return leaf.contiguous()
    # Pinned like the whole batch, else the host would wait for the copy to the GPU.
    return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf)
