"""The rank of this process, reports of one rank only, and the common end of all ranks of a job."""

import importlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import Any

_POLL = 0.5  # seconds
_PATIENCE = 20.0
_SILENCE = 3.0  # seconds without a sign of life, after which nobody waits for a rank


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


def start_process(upstream: Callable[[Any], None], process: Any) -> None:
    """Wraps `BaseProcess.start`: what a rank starts (the writers of checkpoints, the readers of data) ends with it,
    also when it is killed, and then cannot end its daemons itself."""
    if process._target is not None:
        process._target = partial(_run_beside_parent, process._target)
    upstream(process)


def _run_beside_parent(target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    end_with_parent()
    target(*args, **kwargs)


def end_with_parent() -> None:
    """Let this process be killed when the one that started it by `multiprocessing` ends, be it by a fork server."""
    parent = multiprocessing.parent_process()
    if parent is None:  # started in another way
        return

    def end() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, name="parent", daemon=True).start()


class OneCaller:
    """Lets one thread into steps at a time, and only in the process that ran the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: int | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Raises ValueError for a second thread, a step within a step, and a process forked from that of the first."""
        # A fork has the lock as it was, but none of the threads that move messages.
        if self._process not in (None, os.getpid()):
            raise ValueError(
                f"process {os.getpid()} was forked from process {self._process}, which has run steps, and has no "
                "connections to the other ranks; run all steps in one process, and start others before the first step"
            )
        if not self._lock.acquire(blocking=False):
            raise ValueError(
                "a step was called while another step runs, but they would take each other's messages; let one thread "
                "run all steps, one after the other"
            )
        try:
            self._process = os.getpid()
            yield
        finally:
            self._lock.release()


class Outcome:
    """What `make()` returned on this rank, or its error, in a form that can be sent to other ranks: they must not wait
    for an object that a rank could not make."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: Exception | None = None
        self._words = ""
        try:
            self._result = make()
        except Exception as error:
            self._error = error
            is_sentence = isinstance(error, ValueError)
            self._words = str(error) if is_sentence else "".join(traceback.format_exception(error))

    def __getstate__(self) -> dict[str, Any]:
        error = self._error
        if error is not None:  # which may not be pickled
            error = ValueError(self._words) if isinstance(error, ValueError) else RuntimeError(self._words)
        return {"_result": self._result, "_error": error, "_words": self._words}

    def result(self) -> Any:
        """The result of `make()`; raises its error, on other ranks a ValueError or a RuntimeError with its words."""
        if self._error is not None:
            raise self._error
        return self._result


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
    a thread of all others then calls `on_failure(report)`: the main thread may be waiting in a collective. The same
    thread gives signs of life, since nobody must wait for a rank that was killed.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        importlib.import_module("torch.distributed")  # by the main thread, whose errors are shown
        self._on_failure = on_failure
        self._store: Any = None
        self._num_shared = 0
        self._has_reported = self._waits_for_rank_0 = self._rank_0_has_left = False
        self._connected = threading.Event()
        self._left = threading.Event()
        self._size = int(os.environ["WORLD_SIZE"])
        self._server: Any = None
        if is_rank_0() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with suppress(RuntimeError):  # torch.distributed reports a port that is in use
                self._server = _store(is_master=True)
        self._watching = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._watching.start()

    def report(self, failure: str) -> str:
        """Report a failure; returns the first one that any rank has reported."""
        self._has_reported = True
        self._connected.wait(_PATIENCE)
        if self._store is not None and not self._left.is_set():
            try:
                return str(in_time(_PATIENCE, partial(self._store.compare_set, "failure", "", failure)), "utf-8")
            except RuntimeError:  # the store is gone with its process
                self._store = None
                self._left.set()
        return failure

    def share(self, text: str, timeout: timedelta) -> str:
        """The text of rank 0; call it equally often on all ranks. Raises RuntimeError after `timeout`."""
        self._num_shared += 1
        name = f"shared {self._num_shared}"
        seconds = timeout.total_seconds()

        def of_rank_0() -> str:
            if is_rank_0():
                self._store.set(name, text)
            end = time.monotonic() + seconds
            while not self._store.check([name]):
                if time.monotonic() > end:
                    raise RuntimeError(f"rank 0 has not started within {timeout}")
                time.sleep(_POLL / 10)
            return str(self._store.get(name).decode())

        self._connected.wait(seconds)
        return text if self._store is None else str(in_time(seconds + _PATIENCE, of_rank_0))

    def leave(self, wait: bool = False) -> bool:
        """Stop watching the peers. With `wait`, let rank 0 leave first, for some seconds; returns whether it has. Rank
        0 waits until the others are done with the store, without which they would log C++ stacks."""
        if self._left.is_set() or self._store is None:
            return False
        self._waits_for_rank_0 = wait
        self._left.set()
        if threading.current_thread() is self._watching:
            with suppress(RuntimeError):
                self._say_so(self._store)
        else:  # Python aborts if it ends while a thread returns from the store
            self._watching.join(_PATIENCE + _SILENCE)
        return self._rank_0_has_left

    def _say_so(self, store: Any) -> None:
        """Tell the peers that this rank leaves; the last use of the store."""
        if is_rank_0():
            store.set("rank 0 has left", "")
            self._wait_for(store, "others", lambda: store.add("done", 0) >= self._size - 1)
            return
        if self._waits_for_rank_0:
            self._rank_0_has_left = self._wait_for(store, "rank 0", lambda: store.check(["rank 0 has left"]))
        store.add("done", 1)

    def _wait_for(self, store: Any, peers: str, happened: Callable[[], bool]) -> bool:
        """Whether it happened while the `peers`, "rank 0" or "others", still gave signs of life."""
        start = heard = time.monotonic()
        signs = 0
        while not happened():
            now = time.monotonic()
            if (latest := store.add(f"signs of {peers}", 0)) != signs:
                signs = latest
                heard = now
            if now > heard + _SILENCE or now > start + _PATIENCE:
                return False
            time.sleep(_POLL / 10)
        return True

    def _watch(self) -> None:
        store = None
        with suppress(RuntimeError, ValueError):  # torch.distributed fails likewise, in the main thread
            store = self._store = _store(is_master=False)
        self._connected.set()
        if store is None:
            return
        signs = "signs of rank 0" if is_rank_0() else "signs of others"
        with suppress(RuntimeError):
            while not self._left.wait(_POLL):
                store.add(signs, 1)
                if self._has_reported or not store.check(["failure"]):
                    continue
                # The same mistake may be about to end this rank by itself.
                if not self._left.wait(2 * _POLL) and not self._has_reported:
                    self._on_failure(store.get("failure").decode())
                    return
            self._say_so(store)


def in_time(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of `call()`; raises RuntimeError if it takes longer: a store whose process is stopped never answers,
    and its clients have no time-out for that."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"the store of the job has not answered for {seconds:g} s") from None


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
