"""Segments of equal cost in packed sequences, whose tokens attend within their own documents only.

The number of pairs of a query and a key in a segment then depends on the documents in it, not on its position.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from .balanced import balanced
from .cut_positions import check_length, positions, tile
from .segment_time import SegmentTime


def balanced_by_documents(
    sequence_length: int,
    num_segments: int,
    time: SegmentTime,
    documents: Sequence[Sequence[int]],
    multiple_of: int = 1,
) -> tuple[int, ...]:
    """Cut like `balanced`, with `time` that of a sequence of one document; lengths in tokens, first to last.

    `documents` holds, for each sequence of the micro-batch, the positions that documents start at, the first of them 0.
    Raises ParameterError as `balanced` does.
    """
    check_length(sequence_length, num_segments, multiple_of)
    step = tile(sequence_length, num_segments, multiple_of)
    cuts = positions(sequence_length, step)
    lengths = balanced(len(cuts) - 1, num_segments, within_documents(time, documents, cuts))
    bounds = [cuts[number] for number in accumulate(lengths, initial=0)]
    return tuple(end - start for start, end in pairwise(bounds))


def within_documents(time: SegmentTime, documents: Sequence[Sequence[int]], cuts: Sequence[int]) -> SegmentTime:
    """The time of the tokens between two of the ascending positions `cuts`, which are given by their numbers.

    It is the time of a segment of a single document with as many tokens, and with as many pairs as the sequences of the
    micro-batch have on average. Where such a segment would begin before its document, `time` is extended linearly.
    """
    of_sequences = [_pairs_before(cuts, starts) for starts in documents]
    pairs = [sum(counts) / len(documents) for counts in zip(*of_sequences, strict=True)]

    def packed_time(first: int, last: int) -> float:
        length = cuts[last] - cuts[first]
        prefix = (pairs[last] - pairs[first]) / length - (length + 1) / 2
        return time(prefix, prefix + length)

    return packed_time


def _pairs_before(cuts: Sequence[int], starts: Sequence[int]) -> list[int]:
    """The number of pairs of a query and a key, in one sequence, whose query is before each of the `cuts`."""
    ended = [0]  # the pairs of all documents before each one
    for start, end in pairwise(starts):
        ended.append(ended[-1] + _triangle(end - start))
    numbers = [bisect_right(starts, cut) - 1 for cut in cuts]
    return [ended[number] + _triangle(cut - starts[number]) for number, cut in zip(numbers, cuts, strict=True)]


def _triangle(length: int) -> int:
    """The pairs of a document of `length` tokens."""
    return length * (length + 1) // 2
