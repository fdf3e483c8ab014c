"""The named strategies, their requirements, and the function that applies them.

Tested in partition/test_partition.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

from .balanced import balanced, shortest_step, uniform_comp
from .lengths import Task, even, segment_times
from .terapipe import terapipe


@dataclass(frozen=True)
class Strategy:
    """A way to cut, the inputs it needs besides the length, and whether it follows packed documents."""

    cut: Callable[[Task], tuple[int, ...]]
    needs: Literal["nothing", "flops", "time", "measured time"]
    follows_documents: bool = False


def _even(task: Task) -> tuple[int, ...]:
    return even(task.sequence_length, task.num_segments or 1, task.multiple_of)


def _uniform_comp(task: Task) -> tuple[int, ...]:
    assert task.flops is not None
    return uniform_comp(task.sequence_length, task.num_segments or 1, *task.flops, task.multiple_of)


def _balanced(task: Task) -> tuple[int, ...]:
    time = task.time
    assert time is not None
    cut = partial(balanced, task.sequence_length, task.num_segments or 1, time, task.multiple_of)
    if task.documents is not None:
        return cut(documents=task.documents)
    # If kernels are slower for short segments, the time jumps as a segment shrinks, so equal times may not exist, and
    # long segments may be better or worse.
    lengths = cut()
    if min(lengths) < task.full_speed_rows:
        long_enough = cut(min_length=task.full_speed_rows)
        if max(segment_times(long_enough, time)) < max(segment_times(lengths, time)):
            lengths = long_enough
    if task.step is None:
        return lengths
    return shortest_step(lengths, lambda weights: cut(weights=weights), task.step, task.trials)


_BALANCED = Strategy(_balanced, needs="time", follows_documents=True)

# The strategy where --sequence-split-strategy is not given.
DEFAULT_STRATEGY = "balanced"

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "even": Strategy(_even, needs="nothing"),
        "uniform_comp": Strategy(_uniform_comp, needs="flops"),
        "balanced": _BALANCED,
        "terapipe": Strategy(terapipe, needs="time"),
        "profile": replace(_BALANCED, needs="measured time"),
    }
)


def cut_sequence(strategy: str, task: Task) -> tuple[int, ...]:
    """Lengths in tokens of the segments of a sequence, first to last, multiples of `task.multiple_of`.

    Raises ValueError if an input that the strategy needs is missing, or if a segment would be empty.
    """
    used = STRATEGIES[strategy]
    missing = _missing_input(used, task)
    if missing is not None:
        raise ValueError(f"--sequence-split-strategy {strategy} needs {missing}")
    return used.cut(task)


def _missing_input(strategy: Strategy, task: Task) -> str | None:
    """What a strategy needs and a task lacks, with the way out; None if it has all."""
    if strategy.needs == "nothing":
        return None
    given = task.flops if strategy.needs == "flops" else task.time
    if given is not None:
        return None
    if strategy.needs == "measured time":
        return (
            "--sequence-split-profile; write a trace with --pipeline-trace, or use --sequence-split-strategy balanced"
        )
    return (
        "the sizes of a transformer, which this model does not have; use --sequence-split-strategy even, or "
        "--sequence-split-file"
    )
