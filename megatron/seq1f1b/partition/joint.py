"""Batch and tokens cut together (TeraPipe, arXiv 2102.07988, section 3.4).

A unit of the pipeline is then a segment of some of the sequences of a batch. The paper solves the tokens for every
number of sequences on its own, and then a knapsack over the batch, which counts the fill of the pipeline, (K − 1) times
the longest unit, once for every part of the batch. Here the parts share one bound tmax on the time of a unit, and the
knapsack is solved within it, so the fill counts once, as it happens.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from .cost import Time
from .grid import check_length, positions
from .least_latency import least_latency
from .terapipe import Path, lengths_between, shortest_path, table


class Part(NamedTuple):
    """Some of the sequences of a batch, and the lengths of their segments in tokens."""

    num_sequences: int
    lengths: tuple[int, ...]


class _Plan(NamedTuple):
    parts: tuple[tuple[int, Path], ...]
    total: float
    longest: float


def terapipe_joint(
    sequence_length: int, costs: Sequence[Time], num_stages: int, step: int
) -> tuple[Part, ...]:
    """The parts of a batch of len(costs) sequences, in order, of least latency through `num_stages` stages.

    `costs[b - 1](start, end)` is the time that b sequences take together for a segment on the slowest stage. Segments
    are multiples of `step` tokens; their number is free. Raises SplitError if the sequence is no multiple.
    """
    check_length(sequence_length, 1, step)
    cuts = positions(sequence_length, step)
    solvers = [shortest_path(table(cuts, cost)) for cost in costs]
    whole = _knapsack(solvers, inf)
    plan = least_latency(
        lambda tmax: _knapsack(solvers, tmax), weight=num_stages - 1, floor=whole.total, guess=whole.longest
    )
    return tuple(Part(size, lengths_between(cuts, path.ends)) for size, path in plan.parts)


def _knapsack(solvers: Sequence[Callable[[float], Path | None]], tmax: float) -> _Plan | None:
    """Parts that make up the batch, of least total, no unit above tmax."""
    paths = [solve(tmax) for solve in solvers]
    best: list[_Plan | None] = [_Plan((), 0.0, 0.0)]
    for num_sequences in range(1, len(solvers) + 1):
        plans = [
            _Plan(
                (*rest.parts, (size, path)),
                rest.total + path.total,
                max(rest.longest, path.longest),
            )
            for size, path in enumerate(paths[:num_sequences], start=1)
            if path is not None and (rest := best[num_sequences - size]) is not None
        ]
        best.append(min(plans, key=lambda plan: plan.total, default=None))
    return best[-1]
