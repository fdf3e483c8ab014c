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

from megatron.seq1f1b.launch.overlay import patches_of_megatron
from megatron.seq1f1b.process import ranks
from megatron.seq1f1b.process.ranks import OneCaller, Outcome, Peers, check_agreement
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


# It starts processes in every way, and prints their numbers.
PARENT = """
import multiprocessing, time
from megatron.seq1f1b.process.patches import patched, wrapping
from megatron.seq1f1b.process.ranks import start_process

if __name__ == "__main__":
    patched([wrapping("multiprocessing.process.BaseProcess.start", start_process, "")])
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
    assert "multiprocessing.process.BaseProcess.start" in {row.target for row in patches_of_megatron("0.19.2")}


def is_running(process: int) -> bool:
    """Not gone, and not a zombie that nobody has waited for."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


class Store:
    """That of a job of two ranks, of which the other one gives so many signs of life."""

    def __init__(self, signs: int = 0) -> None:
        self.signs = signs
        self.goes_on = threading.Event()

    def add(self, name: str, number: int) -> int:
        if name == "done":
            return int(self.signs == 1)  # with its last sign
        self.signs = max(self.signs - 1, 1) if self.signs else 0
        return self.signs

    def set(self, name: str, value: str) -> None:
        pass

    def check(self, names: list[str]) -> bool:
        return False

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        self.goes_on.wait()
        return b"another"


@pytest.fixture
def peers_of(monkeypatch):
    """The peers of rank 0 of two, with a store; what is waited for ends with it or never."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("TORCHELASTIC_USE_AGENT_STORE", "True")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_SILENCE", 0.3)

    def made(store: Store) -> Peers:
        monkeypatch.setattr(ranks, "_store", lambda is_master: store)
        return Peers(lambda failure: None)

    return made


@pytest.mark.parametrize("signs", [0, 20])
def test_rank_0_waits_for_a_rank_while_it_lives(peers_of, monkeypatch, signs):
    """Here for ever, were it not killed, or done after a while in which it is silent less than so long at a time."""
    monkeypatch.setattr(ranks, "_PATIENCE", 10_000)
    store = Store(signs)
    peers_of(store).leave()
    assert store.signs == min(signs, 1)


def test_a_store_whose_process_is_stopped_is_not_waited_for(peers_of, monkeypatch):
    monkeypatch.setattr(ranks, "_PATIENCE", 0.3)
    store = Store()
    peers = peers_of(store)
    assert peers.report("mine") == "mine"
    assert peers.leave(wait=True) is False
    store.goes_on.set()


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
