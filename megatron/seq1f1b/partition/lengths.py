"""The task of a cut, what all cuts share, equal lengths, and the check of lengths that a user gives.

Tested in partition/test_partition.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm

# The time of a segment of the tokens [start, end), in any unit.
SegmentTime = Callable[[int, int], float]

_KERNEL_TILE = 128
# Rounding moves the cost of a segment by at most one part in this.
_TILES_PER_SEGMENT = 64


@dataclass(frozen=True)
class Task:
    """A sequence of `sequence_length` tokens to cut into `num_segments`, and the inputs of strategies. If
    `num_segments` is None, `terapipe` finds it and the other strategies leave the sequence whole.

    `time` is that of a segment on the slowest of `num_stages` stages. Kernels are at full speed for segments of
    `full_speed_rows` tokens and more. A step runs `num_microbatches` sequences. `flops` are those of `uniform_comp`,
    `documents` those of `balanced`. `step` maps lengths to the time of a step, and is called for at most `trials` cuts.
    """

    sequence_length: int
    num_segments: int | None
    multiple_of: int = 1
    time: SegmentTime | None = None
    flops: tuple[int, int] | None = None
    full_speed_rows: int = 1
    num_stages: int = 1
    num_microbatches: int = 1
    documents: Sequence[Sequence[int]] | None = None
    step: Callable[[tuple[int, ...]], float] | None = None
    trials: int = 0


def segment_multiple(tensor_parallel: int, context_parallel: int) -> int:
    """The number that segment lengths must be multiples of: each of c context-parallel ranks holds two of 2c equal
    parts of a segment, and each of `tensor_parallel` ranks (1 without sequence parallelism) an equal share of that."""
    return tensor_parallel if context_parallel == 1 else context_parallel * lcm(2, tensor_parallel)


def check_length(sequence_length: int, num_segments: int, multiple_of: int) -> None:
    """Raises ValueError if `num_segments` multiples of `multiple_of` cannot make up the sequence."""
    pieces, rest = divmod(sequence_length, multiple_of)
    if rest:
        raise ValueError(
            f"--seq-length {sequence_length} is not a multiple of {multiple_of}, to which segments are rounded with "
            f"sequence parallelism; choose a multiple of {multiple_of}"
        )
    if num_segments > pieces:
        raise ValueError(
            f"--sequence-splits {num_segments} leaves empty segments: --seq-length {sequence_length} has only {pieces} "
            f"pieces of {multiple_of} token(s); use at most {pieces} segments"
        )


def tile(sequence_length: int, num_segments: int, multiple_of: int) -> int:
    """The multiple of `multiple_of` that segments are rounded to, for long segments also one of the kernels' tile."""
    size = lcm(multiple_of, _KERNEL_TILE)
    while size > multiple_of and sequence_length < _TILES_PER_SEGMENT * num_segments * size:
        size = size // 2 if size % (2 * multiple_of) == 0 else multiple_of
    return size


def positions(sequence_length: int, step: int) -> list[int]:
    """The positions at which a sequence may be cut, its start and its end among them: `step` apart, but for the first
    part, which takes the remainder."""
    first = step + sequence_length % step
    return [0, *range(first, sequence_length + 1, step)]


def segment_times(lengths: Iterable[int], time: SegmentTime) -> list[float]:
    """The time of each segment of a sequence."""
    return [time(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]


def even(sequence_length: int, num_segments: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Lengths that differ by at most `multiple_of`, all multiples of it; longer ones first, where the prefix is short.
    Raises ValueError if the sequence is too short for that many segments, or is not a multiple itself."""
    check_length(sequence_length, num_segments, multiple_of)
    pieces, num_longer = divmod(sequence_length // multiple_of, num_segments)
    longer = (multiple_of * (pieces + 1),) * num_longer
    others = (multiple_of * pieces,) * (num_segments - num_longer)
    return longer + others


def check_lengths(lengths: Sequence[int], sequence_length: int, num_segments: int | None, multiple_of: int) -> None:
    """Raises ValueError if given lengths do not fit the sequence, the number of segments or the parallel sizes."""
    odd = [length for length in lengths if length % multiple_of]
    if sum(lengths) != sequence_length:
        raise ValueError(f"its lengths add up to {sum(lengths)}, not to --seq-length {sequence_length}; change one")
    if num_segments not in (None, len(lengths)):
        raise ValueError(f"it holds {len(lengths)} segments, not --sequence-splits {num_segments}; change one")
    if odd:
        raise ValueError(
            f"it holds a segment of {odd[0]} tokens; sequence parallelism needs a multiple of {multiple_of}"
        )
