"""Steps predicted from what single actions took in other runs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median

from megatron.seq1f1b.costs import StageCost, action_costs
from megatron.seq1f1b.costs.measured_time import Point, fit
from megatron.seq1f1b.schedule import Kind, lower
from megatron.seq1f1b.simulator import execute_lowered

from .results import as_run
from .variants import Variant


def cost_of_segments(profiled: Sequence[Variant]) -> tuple[StageCost, ...]:
    """What a segment of any length costs on every stage, by the median times of single actions (`measured_time.fit`).

    `profiled` are runs with backwards split into I and W, each with segments of another length.
    """
    return tuple(_cost_of_stage(profiled, stage) for stage in range(profiled[0].shape.num_stages))


def _cost_of_stage(profiled: Sequence[Variant], stage: int) -> StageCost:
    forward, backward, weight = (
        fit([point for variant in profiled for point in _points(variant, stage, kinds)])
        for kinds in ((Kind.F,), (Kind.I, Kind.W), (Kind.W,))
    )
    return StageCost(forward, backward, weight, forward + backward)


def _points(variant: Variant, stage: int, kinds: tuple[Kind, ...]) -> Iterator[Point]:
    seconds = defaultdict(list)
    for action, start, end in (span for step in variant.spans for rank in step for span in rank):
        seconds[action.kind, action.stage, action.segment].append(end - start)
    for segment, (start, end) in enumerate(pairwise(accumulate(variant.lengths, initial=0))):
        time = sum(median(seconds[kind, stage, segment]) for kind in kinds)
        yield Point(end - start, start, time)


def predicted_seconds(variant: Variant, stages: Sequence[StageCost], message_seconds: float) -> float:
    """The schedule of a variant, lowered, with such costs and messages."""
    costs = action_costs(stages, [1] * len(stages), variant.lengths)
    messages = tuple((message_seconds,) * len(variant.lengths) for _ in stages)
    costs = replace(costs, message_f=messages, message_b=messages)
    return execute_lowered(lower(as_run(variant)), costs).makespan


def table(rows: Sequence[tuple[str, float, float]]) -> str:
    """Name, measured and predicted seconds of each configuration."""
    lines = [f"{'configuration':52}{'measured':>10}{'predicted':>11}{'error':>9}"]
    for name, measured, predicted in rows:
        lines.append(f"{name:52}{measured:10.3f}{predicted:11.3f}{100 * (predicted / measured - 1):+8.1f} %")
    errors = [abs(predicted / measured - 1) for _, measured, predicted in rows]
    lines.append(f"mean error {100 * sum(errors) / len(errors):.1f} %, worst {100 * max(errors):.1f} %")
    return "\n".join(lines)
