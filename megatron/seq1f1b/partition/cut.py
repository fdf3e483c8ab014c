"""The named strategies, each with what it needs, and the one function that applies them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ..errors import ParameterError
from .balanced import balanced
from .cut_positions import check_length
from .documents import balanced_by_documents
from .segment_time import SegmentTime, segment_times
from .terapipe import terapipe
from .uniform_comp import uniform_comp


@dataclass(frozen=True)
class Task:
    """A sequence to cut, and what a strategy may use; see `cut_sequence`."""

    sequence_length: int
    num_segments: int
    multiple_of: int
    time: SegmentTime | None
    flops: tuple[int, int] | None
    full_speed_rows: int
    num_stages: int
    num_microbatches: int
    documents: Sequence[Sequence[int]] | None


@dataclass(frozen=True)
class Strategy:
    """A way to cut, what it needs of a task beside the length, and whether it follows packed documents."""

    cut: Callable[[Task], tuple[int, ...]]
    needs: Literal["nothing", "flops", "time", "measured time"]
    follows_documents: bool = False

    @property
    def needs_time(self) -> bool:
        return self.needs in ("time", "measured time")


def even(sequence_length: int, num_segments: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Cut into segments whose lengths differ by at most `multiple_of` tokens.

    Every segment is a multiple of `multiple_of` (tensor-parallel ranks share a segment evenly under sequence
    parallelism). The longer segments come first, where the causal prefix is short. Raises ParameterError if the
    sequence is too short for that many segments, or is itself no multiple.
    """
    check_length(sequence_length, num_segments, multiple_of)
    base, longer = divmod(sequence_length // multiple_of, num_segments)
    return tuple(multiple_of * (base + (i < longer)) for i in range(num_segments))


def _even(task: Task) -> tuple[int, ...]:
    return even(task.sequence_length, task.num_segments, task.multiple_of)


def _uniform_comp(task: Task) -> tuple[int, ...]:
    assert task.flops is not None
    return uniform_comp(task.sequence_length, task.num_segments, *task.flops, task.multiple_of)


def _balanced(task: Task) -> tuple[int, ...]:
    time = task.time
    assert time is not None
    if task.documents is not None:
        return balanced_by_documents(task.sequence_length, task.num_segments, time, task.documents, task.multiple_of)
    # Where the kernels are slower for short segments, the time jumps as a segment shrinks, and equal times may not
    # exist; it can then be better to keep every segment long enough, or worse.
    free = balanced(task.sequence_length, task.num_segments, time, task.multiple_of, 1)
    if min(free) >= task.full_speed_rows:
        return free
    long = balanced(task.sequence_length, task.num_segments, time, task.multiple_of, task.full_speed_rows)
    return min((free, long), key=lambda lengths: max(segment_times(lengths, time)))


def _terapipe(task: Task) -> tuple[int, ...]:
    assert task.time is not None
    return terapipe(
        task.sequence_length,
        task.time,
        num_stages=task.num_stages,
        num_segments=task.num_segments,
        multiple_of=task.multiple_of,
        num_microbatches=task.num_microbatches,
    )


_BALANCED = Strategy(_balanced, needs="time", follows_documents=True)

# Of --sequence-splits without a strategy.
DEFAULT_STRATEGY = "balanced"

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "even": Strategy(_even, needs="nothing"),
        "uniform_comp": Strategy(_uniform_comp, needs="flops"),
        "balanced": _BALANCED,
        "terapipe": Strategy(_terapipe, needs="time"),
        "profile": replace(_BALANCED, needs="measured time"),
    }
)

_WITHOUT_SIZES = (
    "{strategy} needs the sizes of a transformer, which this model does not have; use {strategy:even}, or "
    "{lengths_file.name}"
)
_WITHOUT = {
    "flops": _WITHOUT_SIZES,
    "time": _WITHOUT_SIZES,
    "measured time": "{strategy} needs {profile.name}; measure one with `seq1f1b profile`, or use {strategy:balanced}",
}


def cut_sequence(
    strategy: str,
    sequence_length: int,
    num_segments: int,
    multiple_of: int = 1,
    *,
    time: SegmentTime | None = None,
    flops: tuple[int, int] | None = None,
    full_speed_rows: int = 1,
    num_stages: int = 1,
    num_microbatches: int = 1,
    documents: Sequence[Sequence[int]] | None = None,
) -> tuple[int, ...]:
    """Lengths in tokens of the `num_segments` segments of a sequence, first to last, multiples of `multiple_of`.

    `time` is that of a segment on the slowest of `num_stages` stages, and kernels are at full speed for segments of
    `full_speed_rows` tokens and more; `num_microbatches` sequences follow one another in a step. `flops` are per token
    and per pair of a query and a key, as `uniform_comp` counts them. `documents` holds, for each sequence of a
    micro-batch, the positions that documents start at. A strategy uses what `STRATEGIES` lists for it.

    Raises ParameterError for an unknown strategy, for fewer than one segment, for what the strategy needs and is not
    given, and for a cut that would leave a segment empty.
    """
    if strategy not in STRATEGIES:
        raise ParameterError("{strategy} is unknown; choose one of {0}", ", ".join(STRATEGIES), strategy=strategy)
    if num_segments < 1:
        raise ParameterError("{num_segments} must be at least 1", num_segments=num_segments)
    needs = STRATEGIES[strategy].needs
    if (needs == "flops" and flops is None) or (STRATEGIES[strategy].needs_time and time is None):
        raise ParameterError(_WITHOUT[needs], strategy=strategy)
    task = Task(
        sequence_length,
        num_segments,
        multiple_of,
        time,
        flops,
        full_speed_rows,
        num_stages,
        num_microbatches,
        documents,
    )
    return STRATEGIES[strategy].cut(task)
