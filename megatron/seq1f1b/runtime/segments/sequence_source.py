"""The sequences of a step, as they are in the batches of all replicas, for units that are packed anew.

Tested in runtime/test_documents.py.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...model import starts_of_documents
from ...process.ranks import Outcome
from ..step import Step
from .segmentation import on_all_ranks

# The entries of a batch that may mark documents; the first one present is used.
_MARKS = ("cu_seqlens_padded", "cu_seqlens", "attention_mask", "tokens")

# Entries of a batch that follow from the lengths of its sequences.
BOUNDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

# One sequence: its part [n] of every entry of a batch.
SequenceEntries = Mapping[str, Tensor]


class SequenceSource:
    """The sequences of a step: those in the batches of this replica, those of the others, and their exchange. A
    rehearsal, whose tokens have no values and which runs one rank, has another one."""

    def in_batch(self, batch: Any, step: Step, end_of_document: int | None) -> list[SequenceEntries]:
        """The sequences of a batch up to their last token with a loss; those without a loss are left out."""
        sequences = batch
        if isinstance(batch, dict):
            # Without entries of one number per sequence, such as the data set in a blend.
            rows = {name: leaf for name, leaf in batch.items() if name not in BOUNDS and leaf.dim() > 1}
            starts = document_starts(batch, (step.batch_size, step.seq_length), end_of_document)
            sequences = []
            for row, is_start in enumerate(starts):
                bounds = [*is_start.nonzero().view(-1).tolist(), step.seq_length]
                for start, end in pairwise(bounds):
                    sequences.append({name: leaf[row, start:end] for name, leaf in rows.items()})
        trimmed = [_trimmed(sequence) for sequence in sequences]
        return [sequence for sequence in trimmed if length_of(sequence)]

    def lengths(self, step: Step, own: Outcome) -> list[list[int]]:
        """The lengths of the sequences that each replica has read, on all ranks; raises the error of any replica."""

        def gathered() -> list[Any]:
            outcomes: list[Any] = [None] * step.groups.dp.size()
            dist.all_gather_object(outcomes, own, group=step.groups.dp)
            return [outcome.result() for outcome in outcomes]

        return on_all_ranks(step, gathered)

    def exchanged(
        self,
        step: Step,
        sample: SequenceEntries,
        read: Mapping[int, SequenceEntries],
        owners: Mapping[int, int],
        lengths: Sequence[int],
        readers: Sequence[int],
    ) -> Mapping[int, SequenceEntries]:
        """The sequences that this replica owns, by number, from those that it has `read`; one all-to-all for each entry
        of `sample`. Of the sequence with a number, `owners` and `readers` have the replica, `lengths` the tokens."""
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
        sent = [0] * group.size()  # tokens to each replica
        received = [0] * group.size()  # tokens from each
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
    name = _mark_of(batch)
    if name is None or (name == "tokens" and end_of_document is None):
        raise ValueError(
            "documents are to be kept apart, but a batch is no dict with cu_seqlens, attention_mask or tokens that end "
            "them; drop --sequence-splits and --pipeline-schedule to run Megatron's own schedule"
        )
    if name == "attention_mask":
        mask = batch[name][:, 0]
        _check_shape(name, mask, (*shape, shape[1]))
        return starts_of_documents(mask, "the attention_mask of a batch")
    if name == "tokens":
        tokens = batch[name]
        _check_shape(name, tokens, shape)
        starts = torch.ones(shape, dtype=torch.bool)
        starts[:, 1:] = tokens[:, :-1].cpu() == end_of_document
        return starts
    return _starts_at_positions(name, batch[name], shape)


def _check_shape(name: str, entry: Tensor, expected: tuple[int, ...]) -> None:
    if entry.shape != expected:
        raise ValueError(f"{name} {list(entry.shape)} in a batch does not fit micro-batches of {list(expected)} tokens")


def _starts_at_positions(name: str, entry: Tensor, shape: tuple[int, int]) -> Tensor:
    """`document_starts` by an entry of positions, of which the last in a row is behind the last token."""
    num_sequences, length = shape
    positions = entry.cpu().view(-1, entry.shape[-1]).long()
    if len(positions) != num_sequences or (positions[:, -1] != length).any():
        raise ValueError(
            f"{name} {list(positions.shape)} in a batch reaches to token {positions.max()}, but must have a row "
            f"that ends at {length} for each of the {num_sequences} sequences of a micro-batch"
        )
    starts = torch.zeros(num_sequences, length + 1, dtype=torch.bool)
    starts[:, 0] = True
    return starts.scatter_(1, positions, True)[:, :length]


def _mark_of(batch: Any) -> str | None:
    """The name of the entry of a batch that marks its documents; None if it has none."""
    if not isinstance(batch, dict):
        return None
    for name in _MARKS:
        if batch.get(name) is not None:
            return name
    return None


def length_of(sequence: SequenceEntries) -> int:
    return len(next(iter(sequence.values())))


def _trimmed(sequence: SequenceEntries) -> SequenceEntries:
    mask = sequence.get("loss_mask")
    if mask is None:
        return sequence
    length = int(mask.nonzero().max()) + 1 if mask.any() else 0
    return {name: leaf[:length] for name, leaf in sequence.items()}
