"""The whole launch: one process per pipeline stage, at most as many at once as there are cores."""

import multiprocessing
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import IO

from tqdm import tqdm

from ..ranks import end_with_parent
from .report import StageReport

_LONGEST = 4000  # characters of what a stage has printed


def rehearse(run_stage: Callable[[], StageReport], args: Namespace, ranks: Sequence[int]) -> list[StageReport]:
    """The reports of the stages, in the order of `ranks`, their global ranks; ends the program as soon as one fails.

    `run_stage` runs the stage of `args.rank`. Each stage has a fork of this process, which has imported and parsed
    everything already.
    """
    context = multiprocessing.get_context("fork")
    num_at_once = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting, running, reports = list(ranks), {}, {}
    with tqdm(total=len(ranks), desc="Rehearsing pipeline stages", disable=None, leave=False) as bar:
        try:
            while waiting or running:
                while waiting and len(running) < num_at_once:
                    rank = waiting.pop(0)
                    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, it is closed with its process
                    result, end = context.Pipe(duplex=False)
                    process = context.Process(target=_run, args=(run_stage, args, rank, end, log), daemon=True)
                    process.start()
                    end.close()
                    running[result] = rank, process, log
                for result in wait(list(running), timeout=1):
                    rank, process, log = running[result]
                    try:
                        reports[rank] = result.recv()
                    except EOFError:
                        process.join()
                        raise SystemExit(_failure(rank, process.exitcode, log)) from None
                    del running[result]
                    bar.update()
                bar.refresh()
        finally:
            for _, process, _ in running.values():
                process.kill()
    return [reports[rank] for rank in ranks]


def _failure(rank: int, exit_code: int, log: IO[str]) -> int | str:
    """Print the end of a stage's log, which has its error; returns its exit code, or a sentence if it was killed."""
    log.seek(0)
    sys.stderr.write(log.read()[-_LONGEST:])
    return exit_code if exit_code > 0 else f"error: the process of rank {rank} was ended by signal {-exit_code}."


def _run(run_stage: Callable[[], StageReport], args: Namespace, rank: int, end: Connection, log: IO[str]) -> None:
    """Run one stage in its process: send its report to `end`, print to `log`, and end with the program."""
    end_with_parent()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ["RANK"] = str(rank)
    args.rank = rank
    try:
        end.send(run_stage())
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
