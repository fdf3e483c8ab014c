"""Cuts by a formula: equal lengths, or equal forward work by the count of Seq1F1B's authors."""

from math import sqrt

from .cut_positions import check_length


def even(sequence_length: int, num_segments: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Cut into segments whose lengths differ by at most `multiple_of` tokens.

    Every segment is a multiple of `multiple_of` (tensor-parallel ranks share a segment evenly under sequence
    parallelism). The longer segments come first, where the causal prefix is short. Raises ValueError if the
    sequence is too short for that many segments, or is itself no multiple.
    """
    check_length(sequence_length, num_segments, multiple_of)
    base, longer = divmod(sequence_length // multiple_of, num_segments)
    return tuple(multiple_of * (base + (i < longer)) for i in range(num_segments))


def uniform_comp(
    sequence_length: int, num_segments: int, per_token: int, per_pair: int, multiple_of: int = 1
) -> tuple[int, ...]:
    """Cut into segments of equal forward work (arXiv 2406.03488, section 3.4); lengths in tokens, first to last.

    Token by token the causal attention grows with the prefix, so equal lengths mean unequal work. The authors count,
    for a segment of x tokens that ends at position e,

        cost(x, e) = per_token·x + per_pair·(x·e − x²/2)

    and give every segment one k-th of the whole. These are their lengths exactly, flaws included: it is the cut that
    their tables were measured with.

    `per_token` and `per_pair` are the FLOPs of a token in matrix products, and of a query and a key in attention. The
    segments are solved from the last to the first, each rounded down to a multiple of `multiple_of`; the first takes
    what remains. Raises ValueError if rounding would leave an empty segment, or if the sequence is no multiple.
    """
    check_length(sequence_length, num_segments, multiple_of)
    # A segment of x tokens that ends at `end` costs (per_token + per_pair·end)·x − per_pair/2·x².
    quadratic = per_pair / 2
    target = (per_token * sequence_length + quadratic * sequence_length**2) / num_segments
    lengths: list[int] = []
    end = sequence_length
    for _ in range(num_segments - 1):
        linear = per_token + per_pair * end
        discriminant = linear**2 - 4 * quadratic * target
        # Rounding earlier segments down can leave more than the rest can hold only in degenerate cases.
        root = (linear - sqrt(discriminant)) / (2 * quadratic) if discriminant >= 0 else end
        length = int(root) // multiple_of * multiple_of
        lengths.append(length)
        end -= length
    lengths.append(end)
    if min(lengths) <= 0:
        raise ValueError(
            f"--sequence-splits {num_segments} with --sequence-split-strategy uniform_comp leaves an empty segment of "
            f"--seq-length {sequence_length}; use fewer segments or --sequence-split-strategy even"
        )
    return tuple(reversed(lengths))
