"""The whole launch: one process per pipeline stage, at most as many at once as there are cores."""

import multiprocessing
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from tqdm import tqdm

from .operators import NeedsValues
from .report import StageReport


class Failure(NamedTuple):
    """How a stage failed: the sentence with which it would fail on the cluster, and all that it printed."""

    rank: int
    sentence: str
    details: str = ""


def rehearse(run_stage: Callable, args: Namespace, ranks: Sequence[int]) -> list[StageReport] | Failure:
    """The reports of the stages, in the order of `ranks`, their global ranks; or the first failure.

    `run_stage(progress)` runs the stage of a process, whose rank is that of `args`. Each stage has a fork of this
    process, which has imported and parsed everything already.
    """
    context = multiprocessing.get_context("fork")
    num_at_once = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting, running, done = list(ranks), {}, {}  # done: a share of the stage, then its report
    looks = {"bar_format": "{desc} {bar}| {n:.1f} of {total} [{elapsed}<{remaining}]", "disable": None, "leave": False}
    with tqdm(total=len(ranks), desc="Rehearsing pipeline stages", **looks) as bar:
        try:
            while waiting or running:
                while waiting and len(running) < num_at_once:
                    rank = waiting.pop(0)
                    here, there = context.Pipe(duplex=False)
                    # A child that held the ends of its parent would not notice that the parent was killed.
                    words = run_stage, args, rank, there, (here, *running)
                    process = context.Process(target=_child, args=words, daemon=True)
                    process.start()
                    there.close()
                    running[here] = rank, process
                for connection in wait(list(running)):
                    rank, process = running[connection]
                    try:
                        done[rank] = connection.recv()
                    except EOFError:
                        process.join()
                        return Failure(rank, f"its process ended with exit code {process.exitcode}")
                    if isinstance(done[rank], Failure):
                        return done[rank]
                    if isinstance(done[rank], StageReport):
                        del running[connection]
                        process.join()
                bar.n = sum(share if isinstance(share, float) else 1.0 for share in done.values())
                bar.refresh()
        finally:
            for _, process in running.values():
                process.kill()
    return [done[rank] for rank in ranks]


def _child(
    run_stage: Callable, args: Namespace, rank: int, parent: Connection, inherited: Sequence[Connection]
) -> None:
    """What the process of one stage does: it sends its progress and its result to `parent`."""
    for connection in inherited:
        connection.close()
    log = os.memfd_create("log")
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["RANK"] = str(rank)
    args.rank = rank
    try:
        parent.send(run_stage(parent.send))
    except BaseException as error:
        sys.stdout.flush()
        sys.stderr.flush()
        os.lseek(log, 0, os.SEEK_SET)
        with os.fdopen(log, errors="replace") as file:
            details = file.read()
        sentence = str(error) or type(error).__name__
        if isinstance(error, NeedsValues):
            sentence = f"what runs here depends on values, which tensors of a rehearsal do not have ({error})"
        elif not isinstance(error, SystemExit):
            details += "".join(traceback.format_exception(error))
        elif not isinstance(error.code, str):  # what it printed has the reason
            sentence = (details.strip().splitlines() or [f"exit code {error.code}"])[-1]
        parent.send(Failure(rank, sentence, details))
