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
from textwrap import fill

from megatron.seq1f1b.costs.machine import GIB
from megatron.seq1f1b.costs.simulator import Prediction
from paper.launches import TABLES, WITHOUT_FIGURE, Launch, launches, step_of
from paper.row import Errors, Row, fits

_WIDTH = 118  # of what is printed with --predict, in characters


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--predict", action="store_true", help="step time and memory instead of flags")
    args = parser.parse_args(argv)
    runs = launches(args.table)
    if args.predict:
        print_predictions(args.table, runs)
        return 0
    for launch in runs:
        print(launch.log, launch.gpus, " ".join(launch.flags), sep="\t")
    return 0


def print_predictions(table: str, runs: Sequence[Launch]) -> None:
    """Print a line for each run as soon as it is predicted, then sentences on the errors."""
    lines = _Lines(table, runs)
    print(lines.heading())
    steps = []
    for launch in runs:
        step = step_of(launch)
        print(lines.line(launch, step), flush=True)
        steps.append(step)
    print()
    sentences = errors_of(table, runs).splitlines()
    if table == "terapipe":
        sentences += slower_with_slices(runs, steps)
    for sentence in sentences:
        print(fill(sentence, _WIDTH, subsequent_indent="  "))


class _Lines:
    """The lines of a table of predictions: a run, what is predicted of its step, and what is published beside it."""

    def __init__(self, table: str, runs: Sequence[Launch]) -> None:
        self._table = table
        self._width = max(len(launch.row.label) for launch in runs)
        (self._unit,) = {launch.row.unit for launch in runs}
        self._has_published = any(launch.row.published is not None for launch in runs)
        self._published_heading = f"published {'ratio' if self._unit == 'bubble' else self._unit}"

    def heading(self) -> str:
        words = f"{'run':{self._width}} {'GPUs':>5} {'step s':>9} {'tokens/s':>9} {'GiB':>6}"
        if self._unit == "bubble":
            words += f" {'bubble ratio':>13}"
        if self._has_published:
            words += f" {self._published_heading:>18} {'error':>8}"
        return words

    def line(self, launch: Launch, step: Prediction) -> str:
        row = launch.row
        words = f"{row.label:{self._width}} {launch.gpus:5} "
        if fits(step):
            fullest = max(memory.total for memory in step.memory) / GIB
            words += f"{step.seconds:9.3f} {step.tokens_per_second:9,.0f} {fullest:6.1f}"
        else:
            words += f"{'out of memory':>26}"
        if self._unit == "bubble":
            words += f" {row.predicted:13.4f}"
        if self._has_published:
            words += f" {self._published(row):>18} {self._error(row):>8}"
        return words.rstrip()

    def _published(self, row: Row) -> str:
        if row.published is not None:
            return f"{row.published:,.0f}" if row.published >= 1000 else f"{row.published:.4g}"
        return "" if self._table in WITHOUT_FIGURE else "out of memory"

    def _error(self, row: Row) -> str:
        if row.error is None:
            return ""
        return f"{row.error:+.4f}" if self._unit == "bubble" else f"{100 * row.error:+.1f} %"


def errors_of(table: str, runs: Sequence[Launch]) -> str:
    """The errors of all rows with a published figure, and why others have none."""
    rows = [launch.row for launch in runs if launch.row.error is not None]
    others = len(runs) - len(rows)
    parts = []
    if rows:
        errors = Errors.of(rows)
        if rows[0].unit == "bubble":
            off = f"{errors.mean:.3g} off in the mean, {errors.worst:.3g} at worst"
        else:
            off = f"{100 * errors.mean:.3g} % off in the mean, {100 * errors.worst:.3g} % at worst"
        parts.append(f"{len(rows)} rows with a published figure: {off}.")
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
