"""A plan that differs raises on all ranks and is named; an error goes to other ranks in place of an object; what a rank
starts ends with it; and who may run a step."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.seq1f1b.process.ranks import OneCaller, Outcome, check_agreement
from support.patience import patient


def test_the_ranks_that_differ_from_most_are_named(monkeypatch):
    def agree(*plans: str) -> None:
        monkeypatch.setattr(dist, "get_world_size", lambda: len(plans))
        monkeypatch.setattr(dist, "all_gather_object", lambda into, own: into.__setitem__(slice(None), plans))
        check_agreement("a")

    agree("a", "a", "a")
    with pytest.raises(ValueError, match="rank 1 has b; rank 3 has c; the other ranks have a.*same flags"):
        agree("a", "b", "a", "c")


def test_an_error_is_raised_where_it_was_made_and_sent():
    class Unknown(KeyError):
        """Cannot be pickled."""

    def make(error: Exception) -> None:
        raise error

    assert pickle.loads(pickle.dumps(Outcome(lambda: [1, 2]))).result() == [1, 2]
    for error, kind, words in (
        (ValueError("the data have no end"), ValueError, "^the data have no end$"),
        (Unknown("gone"), RuntimeError, r"(?s)^Traceback .*in make.*Unknown: 'gone'"),
    ):
        outcome = Outcome(lambda error=error: make(error))
        with pytest.raises(type(error)) as here:
            outcome.result()
        assert here.value is error
        with pytest.raises(kind, match=words):
            pickle.loads(pickle.dumps(outcome)).result()


# It installs our schedules, starts processes in every way, and prints their numbers.
PARENT = """
import multiprocessing, time
from megatron.seq1f1b import install

if __name__ == "__main__":
    install(sequence_splits=2)
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,), daemon=True)
        child.start()
        print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_rank_starts_ends_with_it(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        children = [int(parent.stdout.readline()) for _ in range(3)]
        parent.kill()
    deadline = time.monotonic() + patient(30)
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [child for child in children if is_running(child)]
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert not left


def is_running(process: int) -> bool:
    """Not gone, and not a zombie that nobody has waited for."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_one_thread_runs_steps_at_a_time():
    caller, refusals = OneCaller(), []

    def step() -> None:
        try:
            with caller.entered():
                pass
        except ValueError as error:
            refusals.append(str(error))

    with caller.entered():
        other = threading.Thread(target=step)
        other.start()
        other.join()
    step()
    assert len(refusals) == 1 and refusals[0].endswith("let one thread run all steps, one after the other")


def test_a_fork_of_a_process_that_ran_steps_runs_none():
    def enter(caller: OneCaller, result) -> None:
        try:
            with caller.entered():
                result.put("entered")
        except ValueError as error:
            result.put(str(error))

    def in_a_fork(caller: OneCaller) -> str:
        context = multiprocessing.get_context("fork")
        result = context.SimpleQueue()
        child = context.Process(target=enter, args=(caller, result))
        child.start()
        child.join()
        return result.get()

    caller = OneCaller()
    assert in_a_fork(caller) == "entered"  # such as a rank of a program that starts its ranks itself
    with caller.entered():
        pass
    assert f"was forked from process {os.getpid()}, which has run steps" in in_a_fork(caller)
