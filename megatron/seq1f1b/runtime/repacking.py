"""Packs the sequences of a step into units of limited length, regardless of the batches that contain them.

The data of all replicas are read before the step, and every rank plans it from the lengths of all sequences. Tokens
after the last one with a loss are left out of a sequence: causal attention hides them from all losses.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ..model import Segment, differs
from ..process.ranks import Outcome
from .call import Calls
from .partitioned_state import is_partitioned
from .segmentation import CutFunction, Segmentation, StepDocuments, on_all_ranks, segments_of
from .step import Step

# The entries of a batch that may mark documents; the first one present is used.
_MARKS = ("cu_seqlens_padded", "cu_seqlens", "attention_mask", "tokens")

# Entries of a batch that follow from the lengths of its sequences.
BOUNDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

# One sequence: its part [n] of every entry of a batch.
_Sequence = Mapping[str, Tensor]


class Repacking(Segmentation):
    """Units of the sequences or documents of a step.

    `pack(lengths, replicas, equal_counts)` gives the micro-batches of each replica, see `packs_of_step`; `cut` the
    lengths of the segments of a sequence that is alone in its unit; `source` the sequences.
    """

    def __init__(
        self,
        cut: CutFunction,
        pack: Callable[..., Any],
        end_of_document: int | None = None,
        source: "SequenceSource | None" = None,
    ) -> None:
        super().__init__(0, cut, packed=True, end_of_document=end_of_document)
        self._pack = pack
        self._source = source or SequenceSource()

    def cut_step(self, step: Step, calls: Calls | None) -> None:
        """Give the step micro-batches of one row each, as many as this replica has, before the program reads them."""
        reading = Outcome(lambda: self._read(step))
        of_replicas = self._source.lengths(step, Outcome(lambda: list(map(_length, reading.result()[1]))))
        sample, sequences = reading.result()
        plan = self._plan(step, of_replicas)
        if not step.forward_only:
            lengths = [plan.lengths[number] for pack in plan.packs for number in pack.sequences]
            self.documents_of_step = StepDocuments(len(plan.packs), lengths)
        if sample is not None:
            batches = self._batches(step, plan, sample, sequences)
            # A copy for each chunk, since Megatron's functions divide a batch in place.
            step.iterators = [iterator and map(dict, batches) for iterator in step.iterators]
        step.num_microbatches = len(plan.packs)
        step.num_sequences = [1] * len(plan.packs)
        step.segments = [_segments(number, pack, plan.lengths) for number, pack in enumerate(plan.packs)]

    def _plan(self, step: Step, of_replicas: Sequence[Sequence[int]]) -> "_Plan":
        """The units of a step, by the lengths of the sequences that each replica has read."""
        lengths = list(chain(*of_replicas))
        # Replicas exchange tokens, or weights and gradients of chunks, within a step: after equally many actions.
        equal_counts = getattr(step.config, "expert_model_parallel_size", 1) > 1 or is_partitioned(step.chunks)
        shares = self._pack(lengths, len(of_replicas), equal_counts)
        replica = step.groups.dp.rank()
        return _Plan(
            lengths=lengths,
            readers=[reader for reader, each in enumerate(of_replicas) for _ in each],
            owners={number: owner for owner, share in enumerate(shares) for pack in share for number in pack.sequences},
            packs=shares[replica],
            first_read=sum(len(each) for each in of_replicas[:replica]),
        )

    def _batches(
        self, step: Step, plan: "_Plan", sample: _Sequence, sequences: Sequence[_Sequence]
    ) -> list[dict[str, Tensor]]:
        """The batches of this replica's units, from the `sequences` that it has read and those of the others."""
        read = dict(enumerate(sequences, start=plan.first_read))
        own = self._source.exchanged(step, sample, read, plan.owners, plan.lengths, plan.readers)
        return [
            _joined(sample, [own[number] for number in pack.sequences], length=sum(pack.lengths)) for pack in plan.packs
        ]

    def reports(self, of_microbatches: list[Any], step: Step) -> list[Any]:
        """For an evaluation, one report with this replica's share of the sums over all: for --sft Megatron averages the
        means of micro-batches, which depend on the sequences that share a unit."""

        def is_sum(value: Any) -> bool:  # of losses, and its number of tokens
            return isinstance(value, Tensor) and value.numel() == 2

        are_sums = all(isinstance(report, dict) and all(map(is_sum, report.values())) for report in of_microbatches)
        if not (step.forward_only and of_microbatches and are_sums):
            return of_microbatches
        group = step.groups.dp_cp
        sums = tree_map(lambda *values: torch.stack(values).sum(dim=0) / group.size(), *of_microbatches)
        for value in sums.values():
            dist.all_reduce(value, group=group)
        return [sums]

    def _read(self, step: Step) -> tuple[_Sequence | None, list[_Sequence]]:
        """A sample of the batches of a step and all their sequences; None and none on ranks without data."""
        read: list[Any] = []
        for batches in step.iterators:
            if batches:  # the data of all model chunks are the same
                read = [next(batches) for _ in range(step.num_microbatches)]
        sample = _sample(read[0]) if read else None
        found = [each for batch in read for each in self._source.in_batch(batch, step, self.end_of_document)]
        return sample, found


class _Plan(NamedTuple):
    """The units of a step. Sequences are numbered through all replicas, those that the first one has read first."""

    lengths: list[int]  # tokens of each sequence
    readers: list[int]  # the replica that has read it
    owners: dict[int, int]  # the replica that computes it, by its number
    packs: Sequence[Any]  # the units of this replica
    first_read: int  # number of the first sequence that this replica has read


class SequenceSource:
    """The sequences of a step: those in the batches of this replica, those of the others, and their exchange. A
    rehearsal, whose tokens have no values and which runs one rank, has another one."""

    def in_batch(self, batch: Any, step: Step, end_of_document: int | None) -> list[_Sequence]:
        """The sequences of a batch up to their last token with a loss; those without a loss are left out."""
        found = batch
        if isinstance(batch, dict):
            # Without entries of one number per sequence, such as the data set in a blend.
            rows = {name: leaf for name, leaf in batch.items() if name not in BOUNDS and leaf.dim() > 1}
            starts = document_starts(batch, (step.batch_size, step.seq_length), end_of_document)
            found = []
            for row, is_start in enumerate(starts):
                bounds = [*is_start.nonzero().view(-1).tolist(), step.seq_length]
                for start, end in pairwise(bounds):
                    found.append({name: leaf[row, start:end] for name, leaf in rows.items()})
        return [each for each in map(_trimmed, found) if _length(each)]

    def lengths(self, step: Step, own: Outcome) -> list[list[int]]:
        """The lengths of the sequences that each replica has read, on all ranks; raises the error of any replica."""

        def gathered() -> list[Any]:
            found: list[Any] = [None] * step.groups.dp.size()
            dist.all_gather_object(found, own, group=step.groups.dp)
            return [each.result() for each in found]

        return on_all_ranks(step, gathered)

    def exchanged(
        self,
        step: Step,
        sample: _Sequence,
        read: Mapping[int, _Sequence],
        owners: Mapping[int, int],
        lengths: Sequence[int],
        readers: Sequence[int],
    ) -> Mapping[int, _Sequence]:
        """The sequences that this replica owns, by number, from those that it has `read`: one all-to-all for each entry
        of `sample`, of as many tokens as `sent[replica]` and `received[replica]` say."""
        group = step.groups.dp
        if group.size() == 1:
            return read
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else step.device
        # Sent by owner, then by number. So a replica receives its sequences by reader, then by number, and that is by
        # number alone, since each reader's follow those of the reader before it.
        outgoing = sorted(read, key=lambda number: owners[number])
        parts: dict[int, dict[str, Tensor]] = {
            number: {} for number in sorted(owners) if owners[number] == group.rank()
        }
        sent = [0] * group.size()
        received = [0] * group.size()
        for number in outgoing:
            sent[owners[number]] += lengths[number]
        for number in parts:
            received[readers[number]] += lengths[number]
        for name, leaf in sample.items():
            if name in BOUNDS:
                continue
            given = torch.cat([*(read[number][name] for number in outgoing), leaf.new_empty(0)]).to(device)
            taken = torch.empty(sum(received), dtype=leaf.dtype, device=device)
            dist.all_to_all_single(taken, given, received, sent, group=group)
            for number, part in zip(parts, taken.split([lengths[number] for number in parts]), strict=True):
                parts[number][name] = part.to(leaf.device)
        return parts


def document_starts(batch: Any, shape: tuple[int, int], end_of_document: int | None) -> Tensor:
    """Which tokens of a batch of `shape` = (b, s) are the first of a document: booleans [b, s].

    The first of these entries counts: `cu_seqlens` (b rows of ascending positions, 0 and s among them); a boolean
    `attention_mask` [b, 1, s, s], True where hidden; `tokens`, in which `end_of_document` ends a document, as in
    Megatron's GPTDataset. Raises ValueError if the batch has none of them, or one of another shape.
    """
    given = {name: entry for name, entry in batch.items() if entry is not None} if isinstance(batch, dict) else {}
    name = next((name for name in _MARKS if name in given), None)
    if name is None or (name == "tokens" and end_of_document is None):
        raise ValueError(
            "documents are to be kept apart, but a batch is no dict with cu_seqlens, attention_mask or tokens that end "
            "them; drop --sequence-splits and --pipeline-schedule to run Megatron's own schedule"
        )
    num_sequences, length = shape
    entry = given[name][:, 0] if name == "attention_mask" else given[name]
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[:, 0] = True
    if name.startswith("cu_seqlens"):
        positions = entry.cpu().view(-1, entry.shape[-1]).long()
        if len(positions) != num_sequences or (positions[:, -1] != length).any():
            raise ValueError(
                f"{name} {list(positions.shape)} in a batch reaches to token {positions.max()}, but must have a row "
                f"that ends at {length} for each of the {num_sequences} sequences of a micro-batch"
            )
        return torch.nn.functional.pad(starts, (0, 1)).scatter_(1, positions, True)[:, :length]
    expected = (*shape, length) if name == "attention_mask" else shape
    if entry.shape != expected:
        raise ValueError(f"{name} {list(entry.shape)} in a batch does not fit micro-batches of {list(expected)} tokens")
    if name == "tokens":
        starts[:, 1:] = entry[:, :-1].cpu() == end_of_document
        return starts
    starts[:, 1:] = entry.diagonal(-1, 1, 2).cpu()
    if differs(entry, starts.cumsum(1).to(entry.device)):
        raise ValueError(
            "the attention_mask of a batch hides more or less than other documents and later tokens, but segments hide "
            "exactly these; drop --sequence-splits"
        )
    return starts


def _sample(batch: Any) -> _Sequence:
    """The entries of a step's batches, by one of them; raises ValueError for one without a part for each sequence."""
    if not isinstance(batch, dict):
        return batch[0]
    entries = {name: leaf for name, leaf in batch.items() if name in BOUNDS or leaf.dim() > 1}
    for name, leaf in entries.items():
        if name not in BOUNDS and leaf.shape != batch["tokens"].shape:
            raise ValueError(
                f"{name} {list(leaf.shape)} in a batch does not go with --unit-tokens, which separates sequences of "
                f"{list(batch['tokens'].shape)} tokens; drop that entry, an attention_mask by "
                "--no-create-attention-mask-in-dataloader"
            )
    return entries


def _joined(sample: _Sequence, sequences: Sequence[_Sequence], length: int) -> dict[str, Tensor]:
    """Sequences one after the other in one row of `length` tokens, padded with zeros without a loss, with the entries
    of `sample`, a batch or sequence. Positions count from the start of each sequence."""
    lengths = list(map(_length, sequences))
    lengths += [length - sum(lengths)] if length > sum(lengths) else []
    batch = {}
    for name, leaf in sample.items():
        if name in BOUNDS:
            values = [max(lengths)] if name == "max_seqlen" else [[0, *accumulate(lengths)]]
            batch[name] = torch.tensor(values, dtype=leaf.dtype)
        elif name == "position_ids":
            batch[name] = torch.cat([torch.arange(each) for each in lengths])[None].to(leaf)
        else:
            batch[name] = torch.cat([*(each[name] for each in sequences), leaf.new_zeros(length)])[None, :length]
    if any(leaf.is_pinned() for leaf in sample.values()):  # else the host would wait for the copy to the GPU
        return {name: leaf.pin_memory() for name, leaf in batch.items()}
    return batch


def _length(sequence: _Sequence) -> int:
    return len(next(iter(sequence.values())))


def _trimmed(sequence: _Sequence) -> _Sequence:
    mask = sequence.get("loss_mask")
    if mask is None:
        return sequence
    length = int(mask.nonzero().max()) + 1 if mask.any() else 0
    return {name: leaf[:length] for name, leaf in sequence.items()}


def _segments(number: int, pack: Any, lengths: Sequence[int]) -> list[Segment]:
    starts = accumulate((lengths[each] for each in pack.sequences), initial=0)
    return segments_of(number, pack.lengths, (tuple(start for start in starts if start < sum(pack.lengths)),))
