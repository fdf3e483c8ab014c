"""Steps predicted from what single actions took in other runs."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.seq1f1b.costs import StageCost, action_costs, traced_costs
from megatron.seq1f1b.schedule import Span, Timeline, lower
from megatron.seq1f1b.simulator import execute_lowered

from .results import as_run
from .variants import Variant


def cost_of_segments(profiled: Variant) -> tuple[StageCost, ...]:
    """What a segment of any length costs on every stage, by the median times of the actions of a traced run."""
    shape = profiled.shape
    ranks: list[list[Span]] = [[] for _ in range(shape.num_ranks)]
    for step in profiled.spans:
        for spans, more in zip(ranks, step, strict=True):
            spans += more
    meta = {"segment_lengths": list(profiled.lengths)}
    costs, _ = traced_costs(Timeline(shape, tuple(map(tuple, ranks)), "s", meta))
    return costs


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
