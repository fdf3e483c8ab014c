"""Packs the sequences of a step into units of limited length, regardless of the batches that contain them.

The data of all replicas are read before the step, and every rank plans it from the lengths of all sequences. Tokens
after the last one with a loss are left out of a sequence: causal attention hides them from all losses.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ...model import Segment
from ...process.ranks import Outcome
from ..model_calls.calls import Calls
from ..step import Step
from .segmentation import Segmentation, StepDocuments, meets_replicas, segments_of
from .sequence_source import BOUNDS, SequenceEntries, SequenceSource, length_of


class _Plan(NamedTuple):
    """The units of a step. Sequences are numbered through all replicas, those that the first one has read first."""

    lengths: list[int]  # tokens of each sequence
    readers: list[int]  # the replica that has read it
    owners: dict[int, int]  # the replica that computes it, by its number
    packs: Sequence[Any]  # the units of this replica
    first_read: int  # number of the first sequence that this replica has read


class Repacking(Segmentation):
    """Units of the sequences or documents of a step.

    `pack(lengths, replicas, equal_counts)` gives the micro-batches of each replica, see `packs_of_step`; `source` the
    sequences.
    """

    def __init__(
        self,
        pack: Callable[..., Any],
        end_of_document: int | None = None,
        source: SequenceSource | None = None,
    ) -> None:
        super().__init__(num_segments=None, packed=True, end_of_document=end_of_document)
        self._pack = pack
        self._source = source or SequenceSource()

    def cut_step(self, step: Step, calls: Calls | None) -> None:
        """Give the step micro-batches of one row each, as many as this replica has, before the program reads them."""
        # A rank that cannot read its data still takes part in the exchange of lengths, and sends its error there.
        reading = Outcome(lambda: self._read(step))

        def lengths_read() -> list[int]:
            _, sequences = reading.result()
            return [length_of(sequence) for sequence in sequences]

        of_replicas = self._source.lengths(step, Outcome(lengths_read))
        sample, sequences = reading.result()
        plan = self._plan(step, of_replicas)
        if not step.forward_only:
            lengths = [plan.lengths[number] for pack in plan.packs for number in pack.sequences]
            self.documents_of_step = StepDocuments(len(plan.packs), lengths)
        if sample is not None:
            batches = self._batches(step, plan, sample, sequences)
            # A copy for each chunk, since Megatron's functions divide a batch in place.
            step.iterators = [map(dict, batches) if iterator else iterator for iterator in step.iterators]
        step.num_microbatches = len(plan.packs)
        step.num_sequences = [1] * len(plan.packs)
        step.segments = [_segments(number, pack, plan.lengths) for number, pack in enumerate(plan.packs)]

    def cuts_every_call(self, step: Step) -> bool:
        return False  # units are those of the data, which are read once

    def _plan(self, step: Step, of_replicas: Sequence[Sequence[int]]) -> _Plan:
        """The units of a step, by the lengths of the sequences that each replica has read."""
        lengths = list(chain(*of_replicas))
        packs_of_replicas = self._pack(lengths, len(of_replicas), meets_replicas(step))
        readers: list[int] = []
        for reader, lengths_of_reader in enumerate(of_replicas):
            readers += [reader] * len(lengths_of_reader)
        owners: dict[int, int] = {}
        for owner, packs in enumerate(packs_of_replicas):
            for pack in packs:
                owners.update(dict.fromkeys(pack.sequences, owner))
        replica = step.groups.dp.rank()
        return _Plan(
            lengths=lengths,
            readers=readers,
            owners=owners,
            packs=packs_of_replicas[replica],
            first_read=sum(map(len, of_replicas[:replica])),
        )

    def _batches(
        self, step: Step, plan: _Plan, sample: SequenceEntries, sequences: Sequence[SequenceEntries]
    ) -> list[dict[str, Tensor]]:
        """The batches of this replica's units, from the `sequences` that it has read and those of the others."""
        read = dict(enumerate(sequences, start=plan.first_read))
        own = self._source.exchanged(step, sample, read, plan.owners, plan.lengths, plan.readers)
        batches = []
        for pack in plan.packs:
            of_pack = [own[number] for number in pack.sequences]
            batches.append(_joined(sample, of_pack, length=sum(pack.lengths)))
        return batches

    def reports(self, of_microbatches: list[Any], step: Step) -> list[Any]:
        """An evaluation returns one report, with this replica's share of the sums over all replicas: for --sft Megatron
        averages the means of micro-batches, which depend on the sequences that share a unit."""
        if not (step.forward_only and of_microbatches and all(map(_has_sums, of_microbatches))):
            return of_microbatches
        group = step.groups.dp_cp
        sums = tree_map(lambda *values: torch.stack(values).sum(dim=0) / group.size(), *of_microbatches)
        for value in sums.values():
            dist.all_reduce(value, group=group)
        return [sums]

    def _read(self, step: Step) -> tuple[SequenceEntries | None, list[SequenceEntries]]:
        """A sample of the batches of a step and all their sequences; None and none on ranks without data."""
        read: list[Any] = []
        for batches in step.iterators:
            if batches:  # the data of all model chunks are the same
                read = [next(batches) for _ in range(step.num_microbatches)]
        sample = _sample(read[0]) if read else None
        sequences: list[SequenceEntries] = []
        for batch in read:
            sequences += self._source.in_batch(batch, step, self.end_of_document)
        return sample, sequences


def _has_sums(report: Any) -> bool:
    """Whether a report has, for each loss, its sum over tokens and the number of these."""
    if not isinstance(report, dict):
        return False
    return all(isinstance(value, Tensor) and value.numel() == 2 for value in report.values())


def _sample(batch: Any) -> SequenceEntries:
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


def _joined(sample: SequenceEntries, sequences: Sequence[SequenceEntries], length: int) -> dict[str, Tensor]:
    """Sequences one after the other in one row of `length` tokens, padded with zeros without a loss, with the entries
    of `sample`, a batch or sequence. Positions count from the start of each sequence."""
    lengths = [length_of(sequence) for sequence in sequences]
    padding = length - sum(lengths)
    if padding > 0:
        lengths.append(padding)  # like one more sequence, which has no loss
    batch = {}
    for name, leaf in sample.items():
        if name == "max_seqlen":
            batch[name] = torch.tensor([max(lengths)], dtype=leaf.dtype)
        elif name in BOUNDS:  # where sequences start and the last one ends, for the one row
            batch[name] = torch.tensor([[0, *accumulate(lengths)]], dtype=leaf.dtype)
        elif name == "position_ids":
            batch[name] = torch.cat([torch.arange(tokens) for tokens in lengths])[None].to(leaf)
        else:
            parts = [sequence[name] for sequence in sequences]
            batch[name] = torch.cat([*parts, leaf.new_zeros(length)])[None, :length]
    if any(leaf.is_pinned() for leaf in sample.values()):  # else the host would wait for the copy to the GPU
        return {name: leaf.pin_memory() for name, leaf in batch.items()}
    return batch


def _segments(number: int, pack: Any, lengths: Sequence[int]) -> list[Segment]:
    """The segments of a unit, with a document for each of its sequences, and one for its padding if it has some."""
    num_tokens = sum(pack.lengths)
    starts = list(accumulate((lengths[sequence] for sequence in pack.sequences), initial=0))
    if starts[-1] == num_tokens:  # no padding follows the last sequence
        starts.pop()
    return segments_of(number, pack.lengths, (tuple(starts),))
