"""Compare training runs: time, memory and losses as a table, measured timelines as a picture.

Each run is a folder with `log.txt`, the output of Megatron with --log-interval 1, and `trace/`, the folder given to
--pipeline-trace. Each later run is compared with the first.
"""

# Tested in functional_tests/test_quickstart.py by test_quick_start_trains_twice_and_compares.

import re
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from msgspec import Struct

from ..arguments.flags import given_path
from ..files.reading import read_bytes
from ..files.timeline_file import Trace, read_trace
from ..files.typed import Count, Positive, converted
from ..report import plot_timelines
from ..report.text import aligned
from ..schedule import Timeline
from .parsing import PICTURES, Parser, output_path

_COMPARED = 10  # iterations
_LATEST = 10  # iterations to average over, since batches differ
_WARM_UP = 2  # iterations that allocate buffers and connect ranks
_ITERATION = re.compile(
    r"iteration +\d+/.*elapsed time per iteration \(ms\): (?P<ms>[.\d]+).*global batch size: +(?P<batch>\d+)"
    r".*lm loss: (?P<loss>[-+.\dE]+|NAN|-?INF) "
)
_SEQUENCE_LENGTH = re.compile(r"^ *seq_length \.+ (\d+)", re.MULTILINE)
_TRACE = re.compile(r"iteration-(\d+)-pipeline-0\.json")


class _Iteration(Struct):
    ms: Positive
    batch: Count
    loss: float


class TrainingLog(NamedTuple):
    """The losses of the iterations, and their median time, without those that warm up if there are others."""

    losses: tuple[float, ...]
    seconds_per_iteration: float
    tokens_per_second: float


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=given_path, metavar="DIR", help="folders of runs")
    output = output_path(*PICTURES)
    parser.add_argument("--output", type=output, required=True, metavar="FILE", help="the picture of the timelines")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    logs = [read_training_log(run / "log.txt") for run in args.runs]
    traces = [latest_trace(run / "trace") for run in args.runs]
    timelines = [timeline for timeline, _ in traces]
    sizes = {timeline.shape.num_ranks for timeline in timelines}
    if len(sizes) > 1:
        raise ValueError(f"the runs have pipelines of {sorted(sizes)} ranks; compare equal ones")
    names = [run.name for run in args.runs]
    columns = [
        column(name, log, timeline, trace, first=logs[0])
        for name, log, (timeline, trace) in zip(names, logs, traces, strict=True)
    ]
    titles = columns[0]
    rows = [[title, *(column_of_run[title] for column_of_run in columns)] for title in titles]
    print(*aligned(rows, "l", gap=3), losses(names, logs), sep="\n")
    plot_timelines(timelines, args.output)
    print(f"Measured timelines of iteration {traces[0][1].iteration}: {args.output}")


def read_training_log(path: Path) -> TrainingLog:
    """Read a log that was written with --log-interval 1. Raises ValueError if it holds no iteration."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; name the folder of a run, which holds {path.name} and trace")
    text = read_bytes(path).decode("utf-8", errors="replace")
    rows = [match.groupdict() for match in _ITERATION.finditer(text)]
    length = _SEQUENCE_LENGTH.search(text)
    if not rows or length is None:
        raise ValueError(f"{path}: it has no training iteration with its loss; was the run given --log-interval 1?")
    iterations = converted(path, rows, list[_Iteration], "iterations", is_text=True)
    seconds = median([iteration.ms / 1e3 for iteration in iterations[_WARM_UP:] or iterations])
    tokens = iterations[0].batch * converted(path, length[1], Count, "seq_length", is_text=True)
    return TrainingLog(tuple(iteration.loss for iteration in iterations), seconds, tokens / seconds)


def latest_trace(folder: Path) -> tuple[Timeline, Trace]:
    """The last iteration that was traced, of the first pipeline."""
    paths = {}  # by iteration
    for path in folder.glob("*.json"):
        match = _TRACE.fullmatch(path.name)
        if match is not None:
            paths[int(match[1])] = path
    if not paths:
        raise ValueError(f"{folder}: it holds no trace; was the run started with --pipeline-trace?")
    return read_trace(paths[max(paths)])


def column(name: str, log: TrainingLog, timeline: Timeline, trace: Trace, first: TrainingLog) -> dict[str, str]:
    """The column of a run in the table."""
    peaks = enumerate(trace.peak_memory_bytes)
    latest = min(_LATEST, len(first.losses))
    return {
        "": name,
        "schedule": trace.schedule,
        "segments": str(timeline.shape.num_segments),
        "seconds per iteration": f"{log.seconds_per_iteration:.2f}",
        "  of the first run": f"{log.seconds_per_iteration / first.seconds_per_iteration:.2f}",
        "tokens per second": f"{log.tokens_per_second:.0f}",
        "bubble ratio of a traced step": f"{timeline.bubble_ratio:.2f}",
        **{f"peak activation memory, rank {rank}": f"{peak / 2**20:.0f} MiB" for rank, peak in peaks},
        "loss of the first iteration": f"{log.losses[0]:.4f}",
        "loss of the last iteration": f"{log.losses[-1]:.4f}",
        f"  mean of the last {latest}": f"{mean(log.losses[-latest:]):.4f}",
    }


def losses(names: list[str], logs: list[TrainingLog]) -> str:
    """The largest difference of losses that should be equal, or the first pair in which only one is a number."""
    rows = list(zip(*(log.losses[:_COMPARED] for log in logs), strict=False))
    difference = 0.0
    for iteration, (first, *others) in enumerate(rows, start=1):
        for name, loss in zip(names[1:], others, strict=True):
            if isfinite(loss) != isfinite(first):
                return f"The losses of iteration {iteration} differ: {first} in {names[0]}, {loss} in {name}."
            if isfinite(loss):
                difference = max(difference, abs(loss - first))
    return f"Losses of the first {len(rows)} iterations differ by at most {difference:.1e}."
