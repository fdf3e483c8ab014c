"""The segments of the sequences of a step, and the starts of the documents in them."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..model import Documents, Segment, differs
from ..process.ranks import Outcome
from .data import SegmentIterator
from .step import Step

# The entries of a batch that may mark documents; the first one present is used.
_MARKS = ("cu_seqlens_padded", "cu_seqlens", "attention_mask", "tokens")

# Lengths of segments by that of a sequence, and by the documents of a micro-batch if there are any.
Cut = Callable[..., Sequence[int]]


class Segmentation:
    """`num_segments` segments of the lengths `cut(sequence_length)`; whole sequences by default.

    In `packed` sequences attention stays within documents, and the lengths are `cut(sequence_length, documents)`. The
    token `end_of_document` ends a document unless batches mark them in another way. `apart` then holds the number of
    micro-batches of the last training step and the lengths of all its documents.
    """

    def __init__(
        self, num_segments: int = 1, cut: Cut = lambda *_: (), packed: bool = False, end_of_document: int | None = None
    ) -> None:
        self.num_segments = num_segments
        self.packed = packed
        self.end_of_document = end_of_document
        self.apart: tuple[int, list[int]] | None = None
        self._cut = cut

    def lengths(self, sequence_length: int, documents: Documents | None = None) -> Sequence[int]:
        """Tokens of each segment, first to last, of a micro-batch with these documents or unpacked."""
        if self.num_segments == 1:
            return (sequence_length,)
        return self._cut(sequence_length) if documents is None else self._cut(sequence_length, documents)

    def cut_step(self, step: Step, check: Callable[[Tensor, str], None]) -> None:
        """Set the segments and the batches of a step. If segments attend to everything before them, `check(mask,
        where)` is called for the masks of batches."""
        checks = self.num_segments > 1 and not self.packed
        step.batches = [
            iterator and SegmentIterator(iterator, check if checks else None) for iterator in step.iterators
        ]
        documents: Sequence[Documents | None] = [None] * step.num_microbatches
        if self.packed:
            documents = packed = documents_of_step(step, self.end_of_document)
            if not step.forward_only:
                bounds = (pairwise((*row, step.seq_length)) for rows in packed for row in rows)
                self.apart = step.num_microbatches, [end - start for row in bounds for start, end in row]
        step.segments = [
            segments_of(number, self.lengths(step.seq_length, within), within)
            for number, within in enumerate(documents)
        ]

    def reports(self, of_microbatches: list[Any], step: Step) -> list[Any]:
        """The return value of a step."""
        return of_microbatches


def segments_of(microbatch: int, lengths: Sequence[int], documents: Documents | None) -> list[Segment]:
    """The segments of a micro-batch with sequences cut into `lengths`."""
    return [
        Segment(microbatch, index, end - length, end, sum(lengths), documents)
        for index, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True))
    ]


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


def documents_of_step(step: Step, end_of_document: int | None) -> list[Documents]:
    """The documents of every micro-batch of a step, on all ranks of a model; the first stage reads its data ahead."""

    def found() -> list[Documents]:
        batches = step.batches[step.placement.chunk_of(0)].read_ahead(step.num_microbatches)
        shape = step.micro_batch_size, step.seq_length
        starts = [document_starts(batch, shape, end_of_document) for batch in batches]
        return [tuple(tuple(row.nonzero().view(-1).tolist()) for row in rows) for rows in starts]

    return on_all_ranks(step, found)


def on_all_ranks(step: Step, make: Callable[[], Any]) -> Any:
    """The result of `make()` on the rank that reads the data, the first tensor-parallel rank of the first stage; its
    error is raised on all ranks."""
    pipeline, tensor, first = step.pipeline, step.groups.tp, step.placement.rank_of(0)
    made = [Outcome(make) if step.rank == first and tensor.rank() == 0 else None]
    if tensor.rank() == 0:
        dist.broadcast_object_list(made, dist.get_global_rank(pipeline, first), group=pipeline)
    dist.broadcast_object_list(made, dist.get_global_rank(tensor, 0), group=tensor)
    return made[0].result()
