"""Segments of equal time, of equal FLOPs, or of the lengths that make the step shortest.

Tested in partition/test_partition.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import ceil, cos, pi, sqrt

from .lengths import SegmentTime, check_length, positions, tile
from .summed_time import Reach, SlowestTime

_BISECTIONS = 40  # of the interval that holds the longest time: to well below the time of one token
_WIDTHS = (0.4, 0.2, 0.1)  # step sizes of the search
_LEAST = 0.05  # smallest weight of a segment; the mean is 1


def balanced(
    sequence_length: int,
    num_segments: int,
    time: SegmentTime,
    multiple_of: int = 1,
    min_length: int = 1,
    documents: Sequence[Sequence[int]] | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Minimise the longest `time(start, end)` of a segment, its forward plus backward on the slowest stage: the
    computation-wise partition of Seq1F1B (arXiv 2406.03488, section 3.4) with measured or modelled times. Returns
    lengths in tokens, first to last. With `weights`, one for each segment, times are in proportion to these.

    Lengths are multiples of `multiple_of`, and of up to 128 tokens if segments are long; the first segment, with the
    cheapest tokens, takes the remainder. No segment is shorter than `min_length`, unless the sequence is too short for
    that. `documents` holds, for each sequence of the micro-batch, the start positions of its documents, the first of
    them 0; `time` is then that of one document. Raises ValueError if the sequence is too short for so many segments, or
    not a multiple of `multiple_of`.
    """
    check_length(sequence_length, num_segments, multiple_of)
    step = tile(sequence_length, num_segments, multiple_of)
    cuts = positions(sequence_length, step)
    between = within_documents(time, documents, cuts) if documents else _between(time, cuts)
    reach = _reach_by(between)
    if isinstance(time, SlowestTime) and not documents:
        reach = time.reach(cuts)  # the same, faster
    last = len(cuts) - 1
    shortest = ceil(min_length / step)  # in steps
    if shortest * num_segments > last:
        shortest = 1

    def ends_within(most: float, earliest: Sequence[int], latest: Sequence[int]) -> list[int]:
        """The indices of the cuts if each segment takes as long as `most` allows; the last of them is before the end of
        the sequence if that is too little time. `earliest` are the indices for less time, `latest` those for more."""
        ends = [0]
        for number in range(num_segments):
            start = ends[-1]
            first = max(start + 1, earliest[number + 1])
            most_here = most if weights is None else most * weights[number]
            end = reach(start, first, latest[number + 1], most_here)
            ends.append(max(end, start + shortest))
        return ends

    first_cuts = [0] * (num_segments + 1)
    last_cuts = [last - left * shortest for left in reversed(range(num_segments + 1))]
    # Find the least time for which the segments reach the end of the sequence: too little is `low`, enough is `high`.
    low = 0.0
    high = between(0, last)
    earliest = first_cuts
    latest = ends_within(high, first_cuts, last_cuts)
    # Kernels may be faster above some length, so a part of the sequence can take longer than the whole.
    while latest[-1] < last:
        high *= 2
        latest = ends_within(high, first_cuts, last_cuts)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        ends = ends_within(middle, earliest, latest)
        if ends[-1] < last:
            low = middle
            earliest = ends
        else:
            high = middle
            latest = ends
    return tuple(cuts[end] - cuts[start] for start, end in pairwise(latest))


def _between(time: SegmentTime, cuts: Sequence[int]) -> SegmentTime:
    """The time of a segment by the indices of the cuts at its ends."""
    return lambda first, last: time(cuts[first], cuts[last])


def _reach_by(between: SegmentTime) -> Reach:
    """A reach that bisects the cuts by the time `between` two of them, which grows with the second."""

    def reach(start: int, first: int, latest: int, most: float) -> int:
        return first - 1 + bisect_right(range(first, latest + 1), most, key=partial(between, start))

    return reach


def within_documents(time: SegmentTime, documents: Sequence[Sequence[int]], cuts: Sequence[int]) -> SegmentTime:
    """The time of a segment by the indices of the `cuts` at its ends, where attention stays within documents.

    That is the time of a segment of one long document with as many tokens and as many query-key pairs, on average over
    the sequences of the micro-batch. With n tokens after a prefix of p, such a segment has n·p + n·(n + 1)/2 pairs,
    which gives p. It may be negative, so that the segment begins before 0.
    """
    of_sequences = [_pairs_before(cuts, starts) for starts in documents]
    pairs = [sum(counts) / len(documents) for counts in zip(*of_sequences, strict=True)]

    def packed_time(first: int, last: int) -> float:
        length = cuts[last] - cuts[first]
        prefix = (pairs[last] - pairs[first]) / length - (length + 1) / 2
        return time(prefix, prefix + length)

    return packed_time


def _pairs_before(cuts: Sequence[int], starts: Sequence[int]) -> list[int]:
    """For each of the `cuts`, the number of query-key pairs of one sequence whose query is before it."""

    def of_document(length: int) -> int:
        return length * (length + 1) // 2

    ended = [0]  # the pairs of all documents before each one
    for start, end in pairwise(starts):
        ended.append(ended[-1] + of_document(end - start))
    numbers = [bisect_right(starts, cut) - 1 for cut in cuts]
    return [ended[number] + of_document(cut - starts[number]) for number, cut in zip(numbers, cuts, strict=True)]


def shortest_step(
    best: tuple[int, ...],
    cut: Callable[[Sequence[float]], tuple[int, ...]],
    seconds: Callable[[tuple[int, ...]], float],
    trials: int,
) -> tuple[int, ...]:
    """The lengths with the shortest step among `trials` cuts around `best`, which has equal times.

    While a pipeline fills and drains, ranks wait for first and last segments, so in a step of few units short ones
    there are better. Two numbers describe such a cut: its `bulge`, how much longer the middle is, and its `slope`, how
    much longer the end is than the start. A step from the best cut found so far changes one of them; steps become
    smaller when none is better. `cut` takes the relative times of segments; `seconds` returns the time of a step.
    """
    places = [(number + 0.5) / len(best) for number in range(len(best))]  # of the middles of segments, from 0 to 1

    def relative_times(bulge: float, slope: float) -> list[float]:
        return [max(_LEAST, 1 - bulge * cos(2 * pi * place) + slope * (2 * place - 1)) for place in places]

    best_bulge = 0.0
    best_slope = 0.0
    least = seconds(best)
    for width in _WIDTHS:
        is_better = True
        while is_better:
            is_better = False
            for more_bulge, more_slope in ((width, 0.0), (-width, 0.0), (0.0, width), (0.0, -width)):
                if trials == 0:
                    return best
                trials -= 1
                bulge = best_bulge + more_bulge
                slope = best_slope + more_slope
                lengths = cut(relative_times(bulge, slope))
                time = seconds(lengths)
                if time < least:
                    best = lengths
                    least = time
                    best_bulge = bulge
                    best_slope = slope
                    is_better = True
                    break
    return best


def uniform_comp(
    sequence_length: int, num_segments: int, per_token: int, per_pair: int, multiple_of: int = 1
) -> tuple[int, ...]:
    """Segments of equal forward work (arXiv 2406.03488, section 3.4); lengths in tokens, first to last.

    With `per_token` FLOPs per token in matrix products and `per_pair` per query-key pair, the authors count per_token·x
    + per_pair·(x·e − x²/2) for a segment of x tokens that ends at position e, and give every segment one k-th of the
    total, from the last to the first, rounded down to a multiple of `multiple_of`; the first takes the remainder. The
    lengths equal theirs exactly, flaws included: their tables were measured with them. Raises ValueError if rounding
    would leave an empty segment, or if the sequence is not a multiple.
    """
    check_length(sequence_length, num_segments, multiple_of)
    quadratic = per_pair / 2
    target = (per_token * sequence_length + quadratic * sequence_length**2) / num_segments
    lengths: list[int] = []
    end = sequence_length
    for _ in range(num_segments - 1):
        linear = per_token + per_pair * end
        discriminant = linear**2 - 4 * quadratic * target
        # Rounding earlier segments down can leave more than the rest can hold only in degenerate cases.
        root = (linear - sqrt(discriminant)) / (2 * quadratic) if discriminant >= 0 else end
        lengths.append(int(root) // multiple_of * multiple_of)
        end -= lengths[-1]
    lengths.append(end)
    if min(lengths) <= 0:
        raise ValueError(
            f"--sequence-splits {num_segments} with --sequence-split-strategy uniform_comp leaves an empty segment of "
            f"--seq-length {sequence_length}; use fewer segments or --sequence-split-strategy even"
        )
    return tuple(reversed(lengths))
