"""Where the sequences of a step are cut."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from ..model import Documents, Segment
from .documents import Packing


class Segmentation:
    """`num_segments` segments of the lengths `cut(sequence_length)`, or of those that follow the documents."""

    def __init__(self, num_segments: int, cut: Callable[[int], Sequence[int]], packing: Packing | None = None) -> None:
        self.num_segments = num_segments
        self.packing = packing
        self._cut = cut

    @property
    def is_trivial(self) -> bool:
        """Whether sequences are neither cut nor packed."""
        return self.num_segments == 1 and self.packing is None

    def common_lengths(self, sequence_length: int) -> Sequence[int] | None:
        """Tokens of each segment, first to last, if they are the same in all micro-batches."""
        return None if self._follows_documents else self.lengths(sequence_length)

    def lengths(self, sequence_length: int, documents: Documents | None = None) -> Sequence[int]:
        """Tokens of each segment, first to last, of a micro-batch with these documents or unpacked."""
        if self.num_segments == 1:
            return (sequence_length,)
        if documents is not None and self._follows_documents:
            return self.packing.cut(sequence_length, documents)
        return self._cut(sequence_length)

    def segments(self, microbatch: int, sequence_length: int, documents: Documents | None) -> list[Segment]:
        """The segments of a micro-batch."""
        lengths = self.lengths(sequence_length, documents)
        return [
            Segment(microbatch, index, end - length, end, sequence_length, documents)
            for index, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True))
        ]

    def description(self, sequence_length: int) -> str:
        """In words, the same on ranks that cut alike."""
        lengths = self.common_lengths(sequence_length)
        if lengths is None:
            return f"{self.num_segments} segments of {sequence_length} tokens that follow the documents"
        within = "" if self.packing is None else " within documents"
        return f"segments of {list(lengths)} tokens{within}"

    @property
    def _follows_documents(self) -> bool:
        return self.num_segments > 1 and self.packing is not None and self.packing.cut is not None
