"""One process for each pipeline stage, none of which outlives the program."""

import os
import signal
import time
from argparse import Namespace
from multiprocessing import get_context

from megatron.seq1f1b.rehearsal.launch import rehearse


def endless(progress):
    while True:
        progress(0.5)
        time.sleep(0.01)


def endless_stage(pids):
    def run(progress):
        with pids.open("a") as file:
            print(os.getpid(), file=file, flush=True)
        endless(progress)

    return run


def test_stages_end_when_the_program_is_killed(tmp_path):
    pids = tmp_path / "pids"
    program = get_context("fork").Process(target=rehearse, args=(endless_stage(pids), Namespace(), range(8)))
    program.start()
    num_stages = min(8, len(os.sched_getaffinity(0)))
    while not pids.exists() or len(pids.read_text().splitlines()) < num_stages:
        time.sleep(0.01)
    os.kill(program.pid, signal.SIGKILL)
    program.join()
    deadline = time.monotonic() + 60
    while any(is_alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
