"""Runs training scripts in forks of one process that has imported Megatron: a job starts at once.

Importing Megatron takes every rank of a fresh torchrun several seconds of a core. Reads one job a
line from standard input, as JSON, and answers each with the exit codes of its ranks.
"""

import argparse
import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import sys
import time

from megatron.seq1f1b.process.child_processes import end_with_parent

# What every rank would import otherwise.
COMMON = (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries",  # and transformers
    "megatron.seq1f1b.launch.executors",
    "megatron.seq1f1b.launch.training_loop",
    "megatron.training.datasets.sft_dataset",
    "pytest",
)


def run_rank(rank: int, job: dict) -> None:
    """What torchrun starts: ``job["script"]`` as a program, with the environment of one rank."""
    os.setpgid(0, 0)  # of all that it starts
    end_with_parent()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(job["ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="localhost", MASTER_PORT=str(job["port"]))
    os.environ.update(job["env"])
    os.chdir(os.path.dirname(job["log"]))
    sys.path[0] = os.path.dirname(job["script"])
    sys.argv = [job["script"], *job["flags"]]
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # as the interpreter does; torch's CheckpointException is no Exception
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:  # a fork of multiprocessing does not
        atexit._run_exitfuncs()


def run(job: dict) -> list[int]:
    """The exit codes of all ranks; of a job that is watched, as by torchrun, the first to fail ends the others."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(r, job)) for r in range(job["ranks"])]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + job["timeout"]
    # The sentinels of multiprocessing would wait for what a killed rank leaves behind: its own children have them, too.
    running = {os.pidfd_open(rank.pid): rank for rank in ranks}
    while running and not (job["watched"] and any(rank.exitcode for rank in ranks)):
        ended = multiprocessing.connection.wait(running, deadline - time.monotonic())
        if not ended:
            break
        for descriptor in ended:
            running.pop(descriptor).join()
            os.close(descriptor)
    for descriptor, rank in running.items():
        rank.kill()
        rank.join()
        os.close(descriptor)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    return [rank.exitcode for rank in ranks]


def import_megatron() -> None:
    from megatron.seq1f1b.platform import cpu
    from support import te_double

    if importlib.util.find_spec(te_double.PACKAGE):
        te_double.load()
    cpu.activate()
    for name in COMMON:
        importlib.import_module(name)
    from megatron.training.arguments import add_megatron_arguments

    # Megatron's parser gets the help of its flags from the source of its classes.
    inspect.getsource = functools.cache(inspect.getsource)
    add_megatron_arguments(argparse.ArgumentParser())


def main() -> None:
    # What imports and jobs print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    import_megatron()
    os.dup2(1, 2)  # an import that fails is told
    gc.collect()
    gc.freeze()  # so that the collections of the ranks leave the pages alone that they share

    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
