"""The rank of this process, reports of one rank only, and the common end of all ranks of a job."""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.managers import SyncManager
from typing import Any

_POLL, _PATIENCE = 0.5, 20.0  # seconds
_PR_SET_PDEATHSIG = 1


def rank() -> int:
    """The number of this process in its job; known before torch.distributed starts."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def is_rank_0() -> bool:
    return rank() == 0


def warn_on_rank_0(message: str) -> None:
    """Log a sentence once in a job, as a warning, which Python shows even before logging is set up."""
    if is_rank_0():
        logging.getLogger("megatron.seq1f1b").warning(message)


def results_queue(usual_mode: str, _: Any, mp_mode: str | None = None) -> Any:
    """Replaces Megatron's `get_write_results_queue`: its process must not outlive a rank that is killed."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context(mp_mode or usual_mode))
        manager.start(end_with_parent)
        filesystem_async._results_queue = manager.Queue()
    return filesystem_async._results_queue


def end_with_parent() -> None:
    """Let this process be killed when the one that forked it ends, on Linux; elsewhere it may outlive a kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def check_agreement(plan: str) -> None:
    """Raise ValueError on all ranks if their plans differ: the step would hang, or compute something else."""
    import torch.distributed as dist

    plans: list[str] = [plan] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    usual, _ = Counter(plans).most_common(1)[0]
    others = [f"rank {rank} has {other}" for rank, other in enumerate(plans) if other != usual]
    if others:
        raise ValueError(
            f"the ranks disagree on what to run: {'; '.join(others)}; the other ranks have {usual}. Start all ranks "
            "with the same flags and files"
        )


class Peers:
    """The ranks of a job, connected from the start of the program by the store at MASTER_ADDR and MASTER_PORT.

    torchrun hosts that store, or rank 0, and torch.distributed joins it later. Any rank may `report` a failure;
    a thread of all others then calls `on_failure(report)`: the main thread may be waiting in a collective.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._store: Any = None
        self._num_shared = 0
        self._connected, self._left = threading.Event(), threading.Event()
        self._size = int(os.environ["WORLD_SIZE"])
        self._server: Any = None
        if is_rank_0() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with suppress(RuntimeError):  # torch.distributed reports a port that is in use
                self._server = _store(is_master=True)
        self._watching = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._watching.start()

    def report(self, failure: str) -> str:
        """Report a failure; returns the first one that any rank has reported."""
        self._connected.wait(_PATIENCE)
        if self._store is not None and not self._left.is_set():
            with suppress(RuntimeError):  # the store is gone with its process
                return str(self._store.compare_set("failure", "", failure).decode())
        return failure

    def share(self, text: str, timeout: timedelta) -> str:
        """The text of rank 0; call it equally often on all ranks. Raises RuntimeError after `timeout`."""
        self._num_shared += 1
        name = f"shared {self._num_shared}"
        end = time.monotonic() + timeout.total_seconds()
        self._connected.wait(timeout.total_seconds())
        if self._store is None:
            return text
        if is_rank_0():
            self._store.set(name, text)
        while not self._store.check([name]):
            if time.monotonic() > end:
                raise RuntimeError(f"rank 0 has not started within {timeout}")
            time.sleep(_POLL / 10)
        return str(self._store.get(name).decode())

    def leave(self, wait: bool = False) -> bool:
        """Stop watching the peers. With `wait`, let rank 0 leave first, for some seconds; returns whether it has. Rank
        0 waits until the others are done with the store, without which they would log C++ stacks."""
        if self._left.is_set() or self._store is None:
            return False
        self._left.set()
        end, has_left = time.monotonic() + _PATIENCE, False
        with suppress(RuntimeError):
            if is_rank_0():
                self._store.set("rank 0 has left", "")
                while self._store.add("done", 0) < self._size - 1 and time.monotonic() < end:
                    time.sleep(_POLL / 10)
            else:
                while wait and not has_left and time.monotonic() < end:
                    has_left = bool(self._store.check(["rank 0 has left"]))
                    time.sleep(_POLL / 10)
                self._store.add("done", 1)
        if threading.current_thread() is not self._watching:
            # Python aborts if it ends while a thread returns from the store.
            self._watching.join(_PATIENCE)
        return has_left

    def _watch(self) -> None:
        with suppress(RuntimeError, ValueError):  # torch.distributed fails likewise, in the main thread
            self._store = _store(is_master=False)
        self._connected.set()
        with suppress(RuntimeError):
            while self._store is not None and not self._left.wait(_POLL):
                if self._store.check(["failure"]):
                    # The same mistake may be about to end this rank by itself.
                    if not self._left.wait(2 * _POLL):
                        self._on_failure(self._store.get("failure").decode())
                    return


def _store(is_master: bool) -> Any:
    import torch.distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        wait_for_workers=False,
        multi_tenant=True,
    )
    prefix = f"seq1f1b/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)
