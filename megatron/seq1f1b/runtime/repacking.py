"""The sequences of a step in units of at most so many tokens, regardless of the batches that contain them.

The data of all replicas are read before the step, and every rank plans it from the lengths of all sequences. Tokens
behind the last token of a sequence that has a loss are left out, since causal attention shows them to no loss.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ..model import Segment
from ..process.ranks import warn_on_rank_0
from ..schedule import Placement
from .call import Call
from .data import SegmentIterator
from .interpreter import Step
from .partitioned_state import is_partitioned
from .segmentation import Apart, Packing, Segmentation, document_starts, reads_data, segments_of, send_to_all_ranks

_log = logging.getLogger(__name__)

# Entries of a batch that follow from the lengths of its sequences.
_BOUNDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

# One sequence: its part [n] of every entry of a batch.
_Sequence = Mapping[str, Tensor]
# The packs of each replica, as `packs_of_step` makes them.
PackStep = Callable[[Sequence[int], int, bool], Sequence[Sequence[Any]]]


class Repacking(Segmentation):
    """Units of the sequences or documents of a step.

    `pack(lengths, replicas, alike)` gives the micro-batches of each replica, see `packs_of_step`; `cut` the lengths of
    the segments of a sequence alone.
    """

    def __init__(self, cut: Callable[[int], Sequence[int]], packing: Packing, pack: PackStep) -> None:
        super().__init__(0, cut, packing)
        self._pack = pack
        self._has_reported = False

    def description(self, sequence_length: int) -> str:
        return f"units, {list(self.lengths(sequence_length))} tokens of a sequence alone"

    def cut_step(self, call: Call, placement: Placement, check: Callable[[Tensor, str], None]) -> Step:
        """The call with micro-batches of one row each, as many as this replica has."""
        # The data of all model chunks are the same.
        read = [
            [_by_tokens(next(batches)) for _ in range(call.num_microbatches)] for batches in call.iterators if batches
        ]
        entries = _Entries(read[0][0]) if read else None
        shape = call.micro_batch_size, call.seq_length
        sequences = [each for batch in read[0] for each in self._sequences(batch, shape)] if read else []
        lengths = _of_all_replicas(call, placement, list(map(_length, sequences)))
        firsts = list(accumulate(map(len, lengths), initial=0))
        flat = [length for each in lengths for length in each]
        # Replicas exchange tokens, or weights and gradients of chunks, within a step: after equally many actions.
        alike = getattr(call.config, "expert_model_parallel_size", 1) > 1 or is_partitioned(call.chunks)
        replica = call.groups.dp.rank()
        shares = self._pack(flat, len(lengths), alike)
        packs = shares[replica]
        if not call.forward_only:
            self.apart = Apart.of(len(packs), (flat[number] for pack in packs for number in pack.sequences))
            self._report(flat, [pack for share in shares for pack in share])
        owners = {number: owner for owner, share in enumerate(shares) for pack in share for number in pack.sequences}
        batches: list[SegmentIterator | None] = [None] * len(call.iterators)
        if entries is not None:
            own = _exchanged(call, entries, dict(enumerate(sequences, firsts[replica])), owners, flat, firsts)
            whole = [entries.joined([own[number] for number in pack.sequences], sum(pack.lengths)) for pack in packs]
            batches = [iterator and SegmentIterator(map(dict, whole)) for iterator in call.iterators]
        call = copy(call)
        call.num_microbatches, call.micro_batch_size = len(packs), 1
        segments = [_segments(number, pack, flat) for number, pack in enumerate(packs)]
        return Step(call, placement, call.pipeline.rank(), segments, batches)

    def reports(self, of_microbatches: list[Any], call: Call) -> list[Any]:
        """Of an evaluation one report, with this replica's share of the sums over all: for --sft Megatron averages the
        means of micro-batches, which depend on what shares a unit."""
        if not (call.forward_only and of_microbatches and all(map(_are_sums, of_microbatches))):
            return of_microbatches
        group = call.groups.dp_cp
        sums = tree_map(lambda *values: torch.stack(values).sum(dim=0) / group.size(), *of_microbatches)
        for value in sums.values():
            dist.all_reduce(value, group=group)
        return [sums]

    def _sequences(self, batch: Any, shape: tuple[int, int]) -> list[_Sequence]:
        """The sequences of a batch up to their last token with a loss; those without a loss are left out."""
        if isinstance(batch, (list, tuple)):
            found = list(batch)
        else:
            starts = document_starts(batch, shape, self.packing.end_of_document)
            rows = {name: leaf for name, leaf in batch.items() if name not in _BOUNDS}
            found = []
            for row, of_row in enumerate(starts):
                bounds = [*of_row.nonzero().view(-1).tolist(), shape[1]]
                for start, end in zip(bounds, bounds[1:], strict=False):
                    found.append({name: leaf[row, start:end] for name, leaf in rows.items()})
        return [each for each in map(_trimmed, found) if _length(each)]

    def _report(self, lengths: Sequence[int], packs: Sequence[Any]) -> None:
        """Log the units of the first step, on rank 0."""
        if self._has_reported:
            return
        self._has_reported = True
        units = [len(pack.lengths) for pack in packs]
        padding = 1 - sum(lengths) / sum(sum(pack.lengths) for pack in packs)
        warn_on_rank_0(
            _log,
            f"The first step has {len(lengths)} sequences of {min(lengths, default=0)} to {max(lengths, default=0)} "
            f"tokens: {len(packs)} micro-batches of {min(units)} to {max(units)} units, {100 * padding:.1f} % padding.",
        )


class _Entries:
    """The entries of the batches of a step; joins sequences to such a batch."""

    def __init__(self, batch: Any) -> None:
        self._bounds: dict[str, torch.dtype] = {}
        one = batch[0] if isinstance(batch, (list, tuple)) else batch
        self.device = next(iter(one.values())).device
        self._are_pinned = any(leaf.is_pinned() for leaf in one.values())
        if one is not batch:
            self.dtypes = {name: leaf.dtype for name, leaf in one.items()}
            return
        shape = batch["tokens"].shape
        unfit = [name for name, leaf in batch.items() if name not in _BOUNDS and leaf.shape != shape]
        if unfit:
            raise ValueError(
                f"{unfit[0]} {list(batch[unfit[0]].shape)} in a batch does not go with --unit-tokens, which separates "
                f"sequences of {list(shape)} tokens"
                + ("; add --no-create-attention-mask-in-dataloader" if unfit[0] == "attention_mask" else "")
            )
        self._bounds = {name: leaf.dtype for name, leaf in batch.items() if name in _BOUNDS}
        self.dtypes = {name: leaf.dtype for name, leaf in batch.items() if name not in _BOUNDS}

    def joined(self, sequences: Sequence[_Sequence], length: int) -> dict[str, Tensor]:
        """Sequences one after the other in one row of `length` tokens, filled up with zeros that have no loss.

        Positions count from the start of each sequence.
        """
        lengths = list(map(_length, sequences))
        lengths += [length - sum(lengths)] if length > sum(lengths) else []
        batch = {}
        for name, dtype in self.dtypes.items():
            filler = torch.zeros(length, dtype=dtype, device=self.device)
            batch[name] = torch.cat([*(each[name] for each in sequences), filler])[None, :length]
        if "position_ids" in batch:
            positions = torch.cat([torch.arange(each) for each in lengths])
            batch["position_ids"] = positions[None].to(batch["position_ids"])
        bounds = {"max_seqlen": [max(lengths)]}
        for name, dtype in self._bounds.items():
            values = bounds.get(name, [[0, *accumulate(lengths)]])
            batch[name] = torch.tensor(values, dtype=dtype)
        if self._are_pinned:  # the host would wait for a GPU that copies from other memory
            return {name: leaf.pin_memory() for name, leaf in batch.items()}
        return batch


def _by_tokens(batch: Any) -> Any:
    """A batch without what has one number for each sequence: in a blend, that of its data set."""
    if not isinstance(batch, dict):
        return batch
    return {name: leaf for name, leaf in batch.items() if name in _BOUNDS or leaf.dim() > 1}


def _are_sums(report: Any) -> bool:
    """Whether each value of a report is a sum of losses and its number of tokens."""
    return isinstance(report, dict) and all(
        isinstance(value, Tensor) and value.numel() == 2 for value in report.values()
    )


def _length(sequence: _Sequence) -> int:
    return len(next(iter(sequence.values())))


def _trimmed(sequence: _Sequence) -> _Sequence:
    mask = sequence.get("loss_mask")
    if mask is None:
        return sequence
    last = int(mask.nonzero().max()) if mask.any() else -1
    return {name: leaf[: last + 1] for name, leaf in sequence.items()}


def _segments(number: int, pack: Any, lengths: Sequence[int]) -> list[Segment]:
    starts = accumulate((lengths[each] for each in pack.sequences), initial=0)
    return segments_of(number, pack.lengths, (tuple(start for start in starts if start < sum(pack.lengths)),))


def _of_all_replicas(call: Call, placement: Placement, lengths: list[int]) -> list[list[int]]:
    """The lengths of the sequences that each replica has read, on all ranks."""
    replicas = call.groups.dp
    gathered: list[Any] = [None] * replicas.size()
    if reads_data(call, placement):
        dist.all_gather_object(gathered, lengths, group=replicas)
    send_to_all_ranks(call, placement, gathered)
    return gathered


def _exchanged(
    call: Call,
    entries: _Entries,
    read: Mapping[int, _Sequence],
    owners: Mapping[int, int],
    lengths: Sequence[int],
    firsts: Sequence[int],
) -> Mapping[int, _Sequence]:
    """The sequences that this replica owns, by number, from those that each replica has `read`.

    Replica r has read the sequences from `firsts[r]` on.
    """
    group = call.groups.dp
    if group.size() == 1:
        return read
    outgoing = [[number for number in read if owners[number] == replica] for replica in range(group.size())]
    incoming = [
        [number for number in range(first, end) if owners[number] == group.rank()]
        for first, end in zip(firsts, firsts[1:], strict=False)
    ]
    sent = [sum(lengths[number] for number in numbers) for numbers in outgoing]
    received = [sum(lengths[number] for number in numbers) for numbers in incoming]
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else call.device
    parts: dict[int, dict[str, Tensor]] = {number: {} for numbers in incoming for number in numbers}
    for name, dtype in entries.dtypes.items():
        own = [read[number][name] for numbers in outgoing for number in numbers]
        given = torch.cat([*own, torch.empty(0, dtype=dtype, device=entries.device)]).to(device)
        taken = torch.empty(sum(received), dtype=dtype, device=device)
        dist.all_to_all_single(taken, given, received, sent, group=group)
        for number, part in zip(parts, taken.split([lengths[number] for number in parts]), strict=True):
            parts[number][name] = part.to(entries.device)
    return parts
