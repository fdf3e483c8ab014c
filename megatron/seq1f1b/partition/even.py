"""Segments of equal length."""

from .grid import check_length


def even(sequence_length: int, num_segments: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Cut into segments whose lengths differ by at most `multiple_of` tokens.

    Every segment is a multiple of `multiple_of` (tensor-parallel ranks share a segment evenly under
    sequence parallelism). The longer segments come first, where the causal prefix is short.

    Raises SplitError if the sequence is too short for that many segments, or is itself no multiple.
    """
    check_length(sequence_length, num_segments, multiple_of)
    base, longer = divmod(sequence_length // multiple_of, num_segments)
    return tuple(multiple_of * (base + (i < longer)) for i in range(num_segments))
