"""Steps predicted from what single actions took in other runs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.costs.stage_costs import TimedSegment
from megatron.seq1f1b.partition import segment_times
from megatron.seq1f1b.schedule import COMPUTE_KINDS, Costs, Kind, lower

from .measured_time import MeasuredTime, fit
from .results import action_seconds, as_run, seconds_between_actions
from .variants import Variant

# By kind of action, what a segment of any length takes on every stage. Backwards are whole (B) or split (I and W).
Profile = dict[Kind, tuple[MeasuredTime, ...]]
_COST_OF = {Kind.F: "f", Kind.B: "i", Kind.I: "i", Kind.W: "w"}  # whole backwards have no weight gradients of their own


def profile_of(runs: Sequence[Variant]) -> Profile:
    """By the times of single actions, with what lies between two of them, in runs with segments of another length each
    (`measured_time.fit`), whose backwards are all whole or all split."""
    stages = range(runs[0].shape.num_stages)
    measured = [(run, action_seconds(run), seconds_between_actions(run)) for run in runs]
    kinds = [kind for kind in measured[0][1] if kind in COMPUTE_KINDS]
    return {
        kind: tuple(
            fit([point for run, seconds, between in measured for point in _points(run, seconds[kind][stage], between)])
            for stage in stages
        )
        for kind in kinds
    }


def _points(run: Variant, seconds: Sequence[float], between: float) -> Iterator[TimedSegment]:
    bounds = pairwise(accumulate(run.lengths, initial=0))
    for (start, end), taken in zip(bounds, seconds, strict=True):
        yield TimedSegment(end - start, start, taken + between)


def predicted_seconds(variant: Variant, profile: Profile, message_seconds: float) -> float:
    """The schedule of a variant, lowered, with such costs and messages."""
    costs = Costs.uniform(variant.shape, message=message_seconds, w=0.0)
    for kind, times in profile.items():
        # A fitted time of next to nothing may come out below it.
        table = tuple(tuple(max(0.0, seconds) for seconds in segment_times(variant.lengths, time)) for time in times)
        costs = replace(costs, **{_COST_OF[kind]: table})
    return execute_lowered(lower(as_run(variant)), costs).makespan


def table(rows: Sequence[tuple[str, float, float]]) -> str:
    """Name, measured and predicted seconds of each configuration."""
    lines = [f"{'configuration':52}{'measured':>10}{'predicted':>11}{'error':>9}"]
    for name, measured, predicted in rows:
        lines.append(f"{name:52}{measured:10.3f}{predicted:11.3f}{100 * (predicted / measured - 1):+8.1f} %")
    errors = [abs(predicted / measured - 1) for _, measured, predicted in rows]
    lines.append(f"mean error {100 * sum(errors) / len(errors):.1f} %, worst {100 * max(errors):.1f} %")
    return "\n".join(lines)
