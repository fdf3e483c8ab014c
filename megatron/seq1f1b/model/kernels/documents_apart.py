"""Each document of a segment in a call of its own, for any kernel."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..documents import Documents, pieces
from .in_calls import InCalls, Index


@dataclass(frozen=True)
class DocumentsApart(InCalls):
    """Runs the kernel on every document of every sequence apart: the work is the sum over the documents."""

    documents: Documents

    def calls(self, num_queries: int, num_keys: int) -> Iterator[tuple[Index, Index]]:
        start = num_keys - num_queries
        for sequence, starts in enumerate(self.documents):
            of_sequence = slice(sequence, sequence + 1)
            for piece in pieces(starts, start, num_keys):
                queries = slice(piece.start - start, piece.end - start)
                yield (queries, of_sequence), (slice(piece.first_key, piece.end), of_sequence)
