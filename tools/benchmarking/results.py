"""The results of a benchmark: a table, and the measured times of actions as a file."""

import json
import statistics
from collections import defaultdict
from math import sqrt
from pathlib import Path

from megatron.seq1f1b.files.writing import written_whole
from megatron.seq1f1b.schedule import Costs, Kind, Schedule, simulate

from .variants import Variant

Seconds = dict[Kind, list[list[float]]]


def table(timed: list[Variant]) -> str:
    """One line per variant: medians of the step, and its ratio to that of the first variant in the same repeat."""
    lines = [
        f"{'schedule':34}{'s/step':>9}{'ratio':>8}{'+-':>7}{'CPU s':>9}"
        f"{'busiest':>9}{'x bubble':>10}{'over it':>9}{'simulated':>11}{'over it':>9}"
    ]
    for variant in timed:
        seconds = statistics.median(variant.seconds)
        ratios = [mine / first for mine, first in zip(variant.seconds, timed[0].seconds, strict=True)]
        error = statistics.stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        line = f"{variant.name:34}{seconds:9.3f}{statistics.median(ratios):8.3f}{error:7.3f}"
        line += f"{statistics.median(variant.cpu_seconds):9.3f}"
        if variant.spans:
            busy = statistics.median(map(busiest, variant.spans))
            bound = busy * ideal(variant) if variant.schedule == "1f1b" else None
            line += f"{busy:9.3f}" + (f"{bound:10.3f}{seconds / bound:9.3f}" if bound else f"{'':19}")
            planned = simulate(as_run(variant), costs(variant)).makespan
            line += f"{planned:11.3f}{seconds / planned:9.3f}"
        lines.append(line)
    return "\n".join(lines)


def busiest(ranks: list) -> float:
    """Seconds that the busiest rank computed in one step."""
    return max(sum(span.end - span.start for span in spans) for spans in ranks)


def ideal(variant: Variant) -> float:
    """The step of 1F1B over its compute: 1 + (P - 1) / (m k C), for equal units and messages that take no time."""
    shape = variant.shape
    return 1 + (shape.num_ranks - 1) / (shape.num_units * shape.num_chunks)


def action_seconds(variant: Variant) -> Seconds:
    """Seconds of each kind of action, `[stage][segment]`: the mean of the micro-batches of a step, as they add up, and
    the median of the steps."""
    steps: dict[tuple[Kind, int, int], list[float]] = defaultdict(list)
    for step in variant.spans:
        of_step: dict[tuple[Kind, int, int], list[float]] = defaultdict(list)
        for action, start, end in (span for rank in step for span in rank):
            of_step[action.kind, action.stage, action.segment].append(end - start)
        for key, seconds in of_step.items():
            steps[key].append(statistics.mean(seconds))
    stages = range(variant.shape.num_stages)
    segments = range(variant.shape.num_segments)
    return {
        kind: [[statistics.median(steps[kind, stage, segment]) for segment in segments] for stage in stages]
        for kind in sorted({kind for kind, _, _ in steps})
    }


def costs(variant: Variant) -> Costs:
    """The measured times as costs; a whole backward counts as all input gradient."""
    seconds = action_seconds(variant)
    parts = {"f": seconds[Kind.F], "i": seconds.get(Kind.I) or seconds[Kind.B], "w": seconds.get(Kind.W, 0.0)}
    return Costs.from_mapping(variant.shape, parts)


def as_run(variant: Variant) -> Schedule:
    """The compute actions of every rank in the order in which they ran."""
    return Schedule(variant.shape, tuple(tuple(span.action for span in spans) for spans in variant.spans[-1]))


def write_profiles(timed: list[Variant], model: dict, path: Path) -> None:
    """The measured times of actions, a list with an entry for each of our variants:

        {"schedule": "zb-h1", "device": "...", "model": {"num_layers": 4, ...}, "num_ranks": 2, "num_chunks": 1,
         "num_microbatches": 2, "lengths": [3584, 1888, 1472, 1248],
         "seconds": {"F": [[0.34, ...], [0.37, ...]], "I": [[...], ...], "W": [[...], ...]}}

    `lengths` are those of the segments in tokens; `seconds` holds for each kind of action that the schedule has (F and
    B, or F, I and W) a list over stages of lists over segments.
    """
    entries = [
        {
            "schedule": variant.schedule,
            **model,
            "num_ranks": variant.shape.num_ranks,
            "num_chunks": variant.shape.num_chunks,
            "num_microbatches": variant.shape.num_microbatches,
            "lengths": list(variant.lengths),
            "seconds": {kind.value: rows for kind, rows in action_seconds(variant).items()},
        }
        for variant in timed
        if variant.spans
    ]
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
