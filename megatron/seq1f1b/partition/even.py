"""Segments of equal length."""

from .errors import SplitError


def even(sequence_length: int, num_segments: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Cut into segments whose lengths differ by at most `multiple_of` tokens.

    Every segment is a multiple of `multiple_of` (tensor-parallel ranks share a segment evenly under
    sequence parallelism). The longer segments come first, where the causal prefix is short.

    Raises SplitError if the sequence is too short for that many segments, or is itself no multiple.
    """
    if sequence_length % multiple_of:
        raise SplitError(
            f"--seq-length {sequence_length} is not a multiple of {multiple_of}, the size that segments are "
            f"rounded to under --sequence-parallel; choose a multiple of {multiple_of}"
        )
    pieces = sequence_length // multiple_of
    if num_segments > pieces:
        raise SplitError(
            f"--sequence-splits {num_segments} leaves empty segments: --seq-length {sequence_length} has only "
            f"{pieces} pieces of {multiple_of} token(s); use at most {pieces} segments"
        )
    base, longer = divmod(pieces, num_segments)
    return tuple(multiple_of * (base + (i < longer)) for i in range(num_segments))
