"""What strategies work with: the positions at which a sequence may be cut, and the time of what lies between."""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from math import gcd, lcm

# Seconds, or any other unit, for a segment of the tokens [start, end).
SegmentTime = Callable[[int, int], float]

KERNEL_TILE = 128
# Rounding moves the cost of a segment by at most one part in this.
_TILES_PER_SEGMENT = 64


def segment_multiple(tensor_parallel: int, context_parallel: int) -> int:
    """Every segment is a multiple of so many tokens, so that all ranks hold equally many.

    Each of c context-parallel ranks holds two of 2c equal parts of a segment, and each of `tensor_parallel` ranks (1
    without sequence parallelism) an equal share of that.
    """
    return tensor_parallel if context_parallel == 1 else context_parallel * lcm(2, tensor_parallel)


def check_length(sequence_length: int, num_segments: int, multiple_of: int) -> None:
    """Raises ValueError if `num_segments` multiples of `multiple_of` cannot make up the sequence."""
    if sequence_length % multiple_of:
        raise ValueError(
            f"--seq-length {sequence_length} is not a multiple of {multiple_of}, to which segments are rounded with "
            f"sequence parallelism; choose a multiple of {multiple_of}"
        )
    pieces = sequence_length // multiple_of
    if num_segments > pieces:
        raise ValueError(
            f"--sequence-splits {num_segments} leaves empty segments: --seq-length {sequence_length} has only {pieces} "
            f"pieces of {multiple_of} token(s); use at most {pieces} segments"
        )


def tile(sequence_length: int, num_segments: int, multiple_of: int) -> int:
    """The length in tokens that segments are rounded to: a multiple of `multiple_of`, and of the kernels' tile of 128
    where segments are long enough to spare the rounding."""
    size = multiple_of * KERNEL_TILE // gcd(multiple_of, KERNEL_TILE)
    while size > multiple_of and sequence_length < _TILES_PER_SEGMENT * num_segments * size:
        size = size // 2 if size % (2 * multiple_of) == 0 else multiple_of
    return size


def positions(sequence_length: int, step: int) -> list[int]:
    """0, and every position a multiple of `step` before the end.

    The remainder goes to the first segment, whose tokens are the cheapest.
    """
    return [0, *range(sequence_length - (sequence_length // step - 1) * step, sequence_length + 1, step)]


def segment_times(lengths: Iterable[int], time: SegmentTime) -> list[float]:
    """The time of each of the segments of a sequence."""
    return [time(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]
