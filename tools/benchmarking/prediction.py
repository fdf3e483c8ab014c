"""Steps predicted from what single actions took in other runs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median

from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.costs.stage_costs import TimedSegment
from megatron.seq1f1b.partition import segment_times
from megatron.seq1f1b.schedule import COMPUTE_KINDS, Costs, Kind, lower

from .measured_time import MeasuredTime, fit
from .results import as_run
from .variants import Variant

# By kind of action, what a segment of any length takes on every stage. Backwards are whole (B) or split (I and W).
Profile = dict[Kind, tuple[MeasuredTime, ...]]
_COST_OF = {Kind.F: "f", Kind.B: "i", Kind.I: "i", Kind.W: "w"}  # whole backwards have no weight gradients of their own


def profile_of(runs: Sequence[Variant]) -> Profile:
    """By the median times of single actions, in runs with segments of another length each (`measured_time.fit`), whose
    backwards are all whole or all split."""
    stages = range(runs[0].shape.num_stages)
    kinds = {span.action.kind for rank in runs[0].spans[0] for span in rank if span.action.kind in COMPUTE_KINDS}
    return {
        kind: tuple(fit([point for run in runs for point in _points(run, stage, kind)]) for stage in stages)
        for kind in kinds
    }


def _points(run: Variant, stage: int, kind: Kind) -> Iterator[TimedSegment]:
    seconds = defaultdict(list)
    for action, start, end in (span for step in run.spans for rank in step for span in rank):
        if (action.kind, action.stage) == (kind, stage):
            seconds[action.segment].append(end - start)
    for segment, (start, end) in enumerate(pairwise(accumulate(run.lengths, initial=0))):
        yield TimedSegment(end - start, start, median(seconds[segment]))


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
