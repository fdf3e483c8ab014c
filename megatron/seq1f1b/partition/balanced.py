"""Segments of equal cost on the slowest stage.

A pipeline runs at the pace of its slowest stage, and a unit waits for the one before it, so every segment should take
that stage equally long, forward plus backward. The idea is the computation-wise partition of Seq1F1B (arXiv
2406.03488, section 3.4), but the cost is that of one stage, includes the backward, and depends on the kind of every
layer. In packed sequences tokens attend within their own documents only, so the pairs of a query and a key in a segment
depend on its documents, not on its position.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from .cut_positions import SegmentTime, check_length, positions, tile

# Halvings of the interval that holds the longest time: to well below the time of one token.
_BISECTIONS = 40


def balanced(
    sequence_length: int,
    num_segments: int,
    time: SegmentTime,
    multiple_of: int = 1,
    min_length: int = 1,
    documents: Sequence[Sequence[int]] | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Minimise the longest `time(start, end)` of a segment; returns lengths in tokens, first to last. With `weights`,
    one for each segment, times are in proportion to these.

    Lengths are multiples of `multiple_of`, and of up to 128 tokens where that does not spoil the balance; the first
    segment, whose tokens are the cheapest, takes what is left over. No segment is shorter than `min_length`, unless
    that many are too many for the sequence. With `documents`, for each sequence of the micro-batch the positions that
    documents start at, the first of them 0, `time` is that of a sequence of one document. Raises ValueError if the
    sequence is too short for so many segments, or no multiple.
    """
    check_length(sequence_length, num_segments, multiple_of)
    step = tile(sequence_length, num_segments, multiple_of)
    cuts = positions(sequence_length, step)
    between = _between(time, cuts) if documents is None else within_documents(time, documents, cuts)
    last, shortest = len(cuts) - 1, -(-min_length // step)
    if shortest * num_segments > last:
        shortest = 1

    def ends(most: float) -> list[int]:
        """The last cut, reached or not, and those before it, where each segment takes up to `most`."""
        found = [0]
        for left in reversed(range(num_segments)):
            start, end = found[-1], last - left * shortest
            here = most if weights is None else most * weights[-1 - left]
            longest = bisect_right(range(start + 1, end + 1), here, key=partial(between, start))
            found.append(max(start + longest, start + shortest))
        return found

    low, high = 0.0, between(0, last)
    # Where a kernel is faster from some length on, a part of the sequence can take longer than the whole.
    while ends(high)[-1] < last:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if ends(middle)[-1] < last:
            low = middle
        else:
            high = middle
    return tuple(cuts[end] - cuts[start] for start, end in pairwise(ends(high)))


def _between(time: SegmentTime, cuts: Sequence[int]) -> SegmentTime:
    return lambda first, last: time(cuts[first], cuts[last])


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
