"""The segments of the sequences of a step, and the starts of the documents in them.

The rank that reads the data finds the starts of documents and sends them to all ranks of a model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..model import Documents, Segment
from ..model.masks import differs
from ..schedule import Placement
from .call import Call
from .data import SegmentIterator
from .interpreter import Step


@dataclass(frozen=True)
class Packing:
    """How documents are packed into sequences.

    `end_of_document` is the id of the token that ends one; None if batches mark documents in another way. If segments
    follow the documents of a micro-batch, `cut(sequence_length, documents)` gives their lengths.
    """

    end_of_document: int | None
    cut: Callable[[int, Documents], Sequence[int]] | None = None


class Apart(NamedTuple):
    """What a step of one replica keeps apart: micro-batches, the tokens of all documents, and the sum of squares of
    their lengths."""

    microbatches: int
    tokens: int
    squares: int

    @classmethod
    def of(cls, microbatches: int, lengths: Iterable[int]) -> "Apart":
        lengths = list(lengths)
        return cls(microbatches, sum(lengths), sum(length**2 for length in lengths))


class Segmentation:
    """`num_segments` segments of the lengths `cut(sequence_length)`; whole sequences by default.

    With `packing`, attention stays within the documents of a sequence, and the lengths may follow them.
    """

    def __init__(
        self, num_segments: int = 1, cut: Callable[[int], Sequence[int]] = lambda _: (), packing: Packing | None = None
    ) -> None:
        self.num_segments = num_segments
        self.packing = packing
        self.apart: Apart | None = None  # in the last training step, if documents are
        self._cut = cut

    @property
    def cuts_sequences(self) -> bool:
        """Whether a sequence may be in several segments."""
        return self.num_segments != 1

    def lengths(self, sequence_length: int, documents: Documents | None = None) -> Sequence[int]:
        """Tokens of each segment, first to last, of a micro-batch with these documents or unpacked."""
        if self.num_segments == 1:
            return (sequence_length,)
        if documents is not None and self.packing.cut is not None:
            return self.packing.cut(sequence_length, documents)
        return self._cut(sequence_length)

    def cut_step(self, call: Call, placement: Placement, check: Callable[[Tensor, str], None]) -> Step:
        """The call cut into segments. `check(mask, where)` is called for the attention masks of batches if segments
        attend to everything before them."""
        checks = self.num_segments > 1 and self.packing is None
        batches = [iterator and SegmentIterator(iterator, check if checks else None) for iterator in call.iterators]
        documents: Sequence[Documents | None] = [None] * call.num_microbatches
        if self.packing is not None:
            documents = packed = documents_of_step(call, placement, batches, self.packing.end_of_document)
            if not call.forward_only:
                rows = chain.from_iterable(packed)
                lengths = (end - start for row in rows for start, end in pairwise((*row, call.seq_length)))
                self.apart = Apart.of(call.num_microbatches, lengths)
        segments = [
            segments_of(number, self.lengths(call.seq_length, within), within)
            for number, within in enumerate(documents)
        ]
        return Step(call, placement, call.pipeline.rank(), segments, batches)

    def reports(self, of_microbatches: list[Any], call: Call) -> list[Any]:
        """What the step returns, from the reports of its micro-batches."""
        return of_microbatches

    def description(self, sequence_length: int) -> str:
        """In words, equal on ranks that cut alike."""
        if self.packing is None:
            return f"segments of {list(self.lengths(sequence_length))} tokens"
        if self.packing.cut is None:
            return f"segments of {list(self.lengths(sequence_length))} tokens within documents"
        return f"{self.num_segments} segments of {sequence_length} tokens that follow the documents"


def segments_of(microbatch: int, lengths: Sequence[int], documents: Documents | None) -> list[Segment]:
    """The segments of a micro-batch, whose sequences are cut into `lengths`."""
    return [
        Segment(microbatch, index, end - length, end, sum(lengths), documents)
        for index, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True))
    ]


def document_starts(batch: Any, shape: tuple[int, int], end_of_document: int | None) -> Tensor:
    """Which tokens of a batch of `shape` = (b, s) are the first of a document: booleans [b, s].

    Read from the first entry that the batch has: `cu_seqlens` (b rows of ascending positions, 0 and s among them); a
    boolean `attention_mask` [b, 1, s, s], which hides the last token of a document from the next token; `tokens`, in
    which `end_of_document` ends a document, as in Megatron's GPTDataset. Raises ValueError if the batch has none of
    them, or one of another shape.
    """
    entries = batch if isinstance(batch, dict) else {}
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[:, 0] = True
    num_sequences, length = shape
    for name in ("cu_seqlens_padded", "cu_seqlens"):
        positions = entries.get(name)
        if positions is not None:
            positions = positions.cpu().view(-1, positions.shape[-1]).long()
            if len(positions) != num_sequences or positions.max() != length:
                raise ValueError(
                    f"{name} {list(positions.shape)} in a batch reaches to token {positions.max()}, but must have a "
                    f"row that ends at {length} for each of the {num_sequences} sequences of a micro-batch"
                )
            return torch.nn.functional.pad(starts, (0, 1)).scatter_(1, positions, True)[:, :length]
    mask = entries.get("attention_mask")
    if mask is not None:
        _check(mask[:, 0], (*shape, length), "attention_mask")
        starts[:, 1:] = mask[:, 0].diagonal(-1, 1, 2).cpu()
        if differs(mask[:, 0], starts.cumsum(1).to(mask.device)):
            raise ValueError(
                "the attention_mask of a batch hides more or less than other documents and later tokens, but segments "
                "hide exactly these; drop --sequence-splits"
            )
        return starts
    tokens = entries.get("tokens")
    if end_of_document is None or tokens is None:
        entry = "cu_seqlens or attention_mask" if end_of_document is None else "cu_seqlens, attention_mask or tokens"
        raise ValueError(
            f"documents are to be kept apart, but a batch is no dict with {entry}; drop --sequence-splits and "
            "--pipeline-schedule to run Megatron's own schedule"
        )
    _check(tokens, shape, "tokens")
    starts[:, 1:] = tokens[:, :-1].cpu() == end_of_document
    return starts


def documents_of_step(
    call: Call, placement: Placement, batches: Sequence[SegmentIterator | None], end_of_document: int | None
) -> list[Documents]:
    """The documents of every micro-batch of a step, on all ranks of a model.

    The first tensor-parallel rank of the first stage reads the `batches` of its chunk ahead.
    """
    documents: list[Documents] = [()] * call.num_microbatches
    if reads_data(call, placement):
        for number, batch in enumerate(batches[placement.chunk_of(0)].read_ahead(call.num_microbatches)):
            starts = document_starts(batch, (call.micro_batch_size, call.seq_length), end_of_document)
            documents[number] = tuple(tuple(row.nonzero().view(-1).tolist()) for row in starts)
    send_to_all_ranks(call, placement, documents)
    return documents


def reads_data(call: Call, placement: Placement) -> bool:
    """Whether this is the first tensor-parallel rank of the first stage."""
    return call.pipeline.rank() == placement.rank_of(0) and call.groups.tp.rank() == 0


def send_to_all_ranks(call: Call, placement: Placement, objects: list) -> None:
    """Replace `objects` on all ranks of a model by those of the rank that reads data."""
    pipeline, tensor = call.pipeline, call.groups.tp
    if tensor.rank() == 0:
        dist.broadcast_object_list(objects, dist.get_global_rank(pipeline, placement.rank_of(0)), group=pipeline)
    dist.broadcast_object_list(objects, dist.get_global_rank(tensor, 0), group=tensor)


def _check(entry: Tensor, shape: tuple[int, ...], name: str) -> None:
    if entry.shape != shape:
        raise ValueError(f"{name} {list(entry.shape)} in a batch does not fit micro-batches of {list(shape)} tokens")
