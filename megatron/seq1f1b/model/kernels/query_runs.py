"""Some of a segment's queries, all of its keys: what a rank has whose heads others have, too."""

from collections.abc import Iterator
from dataclasses import dataclass

from .documents_apart import DocumentsApart
from .in_calls import InCalls, Index
from .interface import Kernel


@dataclass(frozen=True)
class QueryRuns(InCalls):
    """Runs the kernel on each of several runs of a segment of `length` tokens apart, and on each document `within`.

    `runs` are where they start and end in the segment; queries come one run after the other, keys are those of the
    segment after those of its prefix.
    """

    runs: tuple[tuple[int, int], ...]
    length: int
    within: DocumentsApart | None = None

    @classmethod
    def of(cls, kernel: Kernel, runs: tuple[tuple[int, int], ...], length: int) -> "QueryRuns":
        """`kernel` on runs of queries; calls within documents are not nested, since their number differs by run."""
        if isinstance(kernel, DocumentsApart):
            return cls(kernel.kernel, runs, length, kernel)
        return cls(kernel, runs, length)

    def calls(self, num_queries: int, num_keys: int) -> Iterator[tuple[Index, Index]]:
        prefix, done = num_keys - self.length, 0
        for start, end in self.runs:
            if self.within is None:
                yield slice(done, done + end - start), slice(prefix + end)
            else:
                for (queries, sequence), keys in self.within.calls(end - start, prefix + end):
                    yield (slice(done + queries.start, done + queries.stop), sequence), keys
            done += end - start

    def num_own_keys(self, num_queries: int) -> int:
        return self.length
