#!/usr/bin/env python3
"""The runs behind a published table: one line each with the name of its log, its GPUs and its flags, by tabs.

    python tools/paper_launches.py seq1f1b_7b
    python tools/paper_launches.py seq1f1b_7b --predict

With --predict, each line has the prediction in place of the flags and, where a figure is published, that and the error;
the last lines have the mean and the worst. scripts/paper/ runs them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import batched

from megatron.seq1f1b.costs.machine import GIB
from megatron.seq1f1b.costs.simulator import Prediction
from paper.launches import TABLES, WITHOUT_FIGURE, Launch, launches, step_of
from paper.row import Errors, fits


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--predict", action="store_true", help="step time and memory instead of flags")
    args = parser.parse_args(argv)
    runs = launches(args.table)
    if not args.predict:
        for launch in runs:
            print(launch.log, launch.gpus, " ".join(launch.flags), sep="\t")
        return 0
    steps = []
    for launch in runs:
        step = step_of(launch)
        print(_with_prediction(args.table, launch, step), flush=True)
        steps.append(step)
    print(errors_of(args.table, runs))
    if args.table == "terapipe":
        print(*slower_with_slices(runs, steps), sep="\n")
    return 0


def _with_prediction(table: str, launch: Launch, step: Prediction) -> str:
    """What is predicted for a run, and what is published."""
    row = launch.row
    verdict = "out of memory"
    if fits(step):
        fullest = max(memory.total for memory in step.memory) / GIB
        verdict = f"{step.seconds:8.3f} s {step.tokens_per_second:9.0f} tokens/s {fullest:6.1f} GiB"
    unit = "bubble ratio" if row.unit == "bubble" else row.unit
    if row.published is not None:
        published = f"  published: {_figure(row.published)} {unit}"
    elif table in WITHOUT_FIGURE:
        published = ""
    else:
        published = "  published: out of memory"
    if row.error is not None:
        published += f", predicted: {_figure(row.predicted)}, "
        published += f"{row.error:+.3f} off" if row.unit == "bubble" else f"{100 * row.error:+.1f} % off"
    return f"{row.label:60} {launch.gpus:5} GPUs  {verdict:42}{published}".rstrip()


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def errors_of(table: str, runs: list[Launch]) -> str:
    """The errors of all rows with a published figure, and why others have none."""
    rows = [launch.row for launch in runs if launch.row.error is not None]
    others = len(runs) - len(rows)
    parts = []
    if rows:
        errors = Errors.of(rows)
        unit = 1 if rows[0].unit == "bubble" else 100
        mean, worst = (f"{unit * error:.3g}{'' if unit == 1 else ' %'}" for error in (errors.mean, errors.worst))
        parts.append(f"{len(rows)} rows with a published figure: {mean} off in the mean, {worst} at worst.")
    if others:
        reason = WITHOUT_FIGURE.get(table, "published or predicted, they are out of memory")
        parts.append(f"{others} rows without a comparison: {reason}.")
    return "\n".join(parts)


def slower_with_slices(runs: Sequence[Launch], steps: Sequence[Prediction]) -> Iterator[str]:
    """Why slices make a step of TeraPipe longer, where they do. Runs, and their predicted steps, come in pairs: whole
    sequences, then slices."""
    for (_, before), (sliced, after) in batched(zip(runs, steps, strict=True), 2):
        if after.seconds <= before.seconds:
            continue
        assert sliced.row.setup is not None
        setup = sliced.row.setup
        num_slices = len(setup.segments)
        of_sequence = 1000 * max(before.busy) / setup.num_microbatches
        of_slice = 1000 * max(after.busy) / (setup.num_microbatches * num_slices)
        yield (
            f"{sliced.row.group} is slower with slices: {num_slices} cut the bubble ratio from {before.bubble:.2f} to "
            f"{after.bubble:.2f}, but one of them keeps a rank busy for {of_slice:.1f} ms, and a whole sequence for "
            f"{of_sequence:.1f} ms, since so small kernels take hardly less time for fewer tokens."
        )


if __name__ == "__main__":
    sys.exit(main())
