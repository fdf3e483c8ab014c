"""The other ranks of a job, which learn of a failure, and end together."""

import importlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from .farewell import PATIENCE, SILENCE, Farewell
from .job_store import MUTE, Listener, address, hosted_store, is_first_of_its_rank, joined_store
from .ranks import is_rank_0, rank
from .threads import in_time, start_thread

_POLL = 0.5  # seconds between two looks at the store, and between two signs of life
_POLL_FOR_TEXT = 0.05  # seconds between two looks for a text of rank 0
_PATIENCE = 20.0  # seconds that the store may take to answer
_RETRY = 1.0  # seconds between two tries to reach the store


class Peers:
    """The ranks of a job, connected from the start of the program by the store at MASTER_ADDR and MASTER_PORT.

    torchrun or rank 0 hosts that store, and torch.distributed joins it later. Any rank may `report` a failure; on all
    others a thread then calls `on_failure(report)`, since their main thread may be waiting in a collective. The same
    thread gives signs of life, so that nobody waits for a rank that was killed, and sends the report of its own rank,
    which may not have the memory to start a thread when it fails.

    Raises ValueError on rank 0 if it cannot host the store, such as at a port that another program holds.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        importlib.import_module("torch.distributed")  # by the main thread, whose errors are shown
        self._on_failure = on_failure
        self._num_shared = 0  # texts of rank 0
        self._size = int(os.environ["WORLD_SIZE"])
        self._is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._server: Any = None  # kept, since the store is gone with its server
        if is_rank_0() and not self._is_torchruns:
            self._server = hosted_store()

        # What this rank has of its peers. A thread joins the store, and is the only one to use it but for `share`.
        self._store: Any = None  # from `_has_joined` on; None again if this rank goes on alone
        self._farewell: Farewell | None = None  # once there is a store
        self._wrong_store: str | None = None  # why this rank must not use what it found as the store of the job
        self._has_joined = threading.Event()  # set once the thread has joined the store, or never will

        # What this rank and its thread tell each other.
        self._own_failure: str | None = None  # which the thread sends
        self._first_failure: str | None = None  # of any rank, once this one has reported
        self._has_answer = threading.Event()  # set once there is one to the report of this rank, or never will be
        self._waits_for_rank_0 = False
        self._left = threading.Event()  # set once this rank leaves its peers, or goes on alone
        self._woken = threading.Event()  # set for the thread when this rank has reported a failure, or leaves
        self._has_ended = threading.Event()  # set by the thread
        self._watcher: int | None = None  # the number of the thread, which may call `leave` by `on_failure`
        start_thread(self._watch)

    def _go_on_alone(self) -> None:
        """Have no peers from now on, since their store is gone, or was never found."""
        self._store = None
        self._left.set()
        self._has_joined.set()

    def report(self, failure: str) -> str:
        """Report a failure; returns the first one that any rank has reported."""
        self._own_failure = failure
        self._woken.set()
        self._has_joined.wait(_PATIENCE)
        if self._store is None or self._left.is_set():
            return failure
        self._has_answer.wait(_PATIENCE)
        if self._first_failure is None:  # the store is gone with its process, or that is stopped
            self._go_on_alone()
            return failure
        return self._first_failure

    def share(self, text: str, timeout: timedelta) -> str:
        """The text of rank 0; call it equally often on all ranks. Raises RuntimeError after `timeout`, and ValueError
        if the store of the job cannot be reached until then, or if something else is in its place."""
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
                time.sleep(_POLL_FOR_TEXT)
            return str(self._store.get(name), "utf-8")

        self._wait_until_joined(timeout)
        if self._store is None:
            return text
        return str(in_time(seconds + _PATIENCE, of_rank_0, source="the store of the job"))

    def _wait_until_joined(self, timeout: timedelta) -> None:
        """Wait until the thread has joined the store. Raises ValueError after `timeout`, or sooner if something other
        than the job's store answers at its address."""
        end = time.monotonic() + timeout.total_seconds()
        with Listener() as listener:
            while self._wrong_store is None and not self._has_joined.wait(_POLL):
                if listener.silence() > MUTE:
                    self._wrong_store = (
                        f"{address()} accepts connections, but is not the store of this job: it has not answered for "
                        f"{MUTE:g} s. Another program may hold the port; give another MASTER_PORT"
                    )
                elif time.monotonic() > end:
                    self._wrong_store = (
                        f"rank 0 was not reached at {address()} within {timeout} ({listener.problem}); MASTER_ADDR "
                        "must name its host, on which it must have started"
                    )
        if self._wrong_store is not None:
            self._go_on_alone()
            raise ValueError(self._wrong_store)

    def leave(self, wait: bool = False) -> bool:
        """Stop watching the peers. With `wait`, give rank 0 some seconds to leave first; returns whether it has."""
        if self._left.is_set() or self._farewell is None:
            return False
        self._waits_for_rank_0 = wait
        self._left.set()
        self._woken.set()
        if threading.get_ident() == self._watcher:
            with suppress(RuntimeError):
                self._farewell.say(wait)
        else:  # Python aborts if it ends while a thread returns from the store
            self._has_ended.wait(PATIENCE + SILENCE)
        return self._farewell.rank_0_has_left

    def _watch(self) -> None:
        """Run in a thread: join the other ranks, follow them until this one leaves, and say farewell."""
        self._watcher = threading.get_ident()
        try:
            store = self._joined_store()
            if store is not None and not self._left.is_set():
                self._farewell = Farewell(store, self._size)
                self._store = store
                self._has_joined.set()
                with suppress(RuntimeError, MemoryError):  # the store is gone
                    self._follow(store, self._farewell)
        finally:
            for event in (self._has_joined, self._has_answer, self._has_ended):
                event.set()

    def _follow(self, store: Any, farewell: Farewell) -> None:
        while not self._left.is_set():
            try:
                failure = self._look(store, farewell)
            except MemoryError:  # what takes it may be about to fail, and this thread must tell the others
                continue
            if failure is not None:
                self._on_failure(failure)
                return
        farewell.say(self._waits_for_rank_0)

    def _look(self, store: Any, farewell: Farewell) -> str | None:
        """Wait a while, or until woken; then give a sign of life, send the report of this rank, and return that of
        another one, if there is one."""
        if self._woken.wait(_POLL):
            self._woken.clear()
        if self._own_failure is not None and self._first_failure is None:
            self._first_failure = str(store.compare_set("failure", "", self._own_failure), "utf-8")
            self._has_answer.set()
        farewell.give_sign()
        if self._own_failure is not None or not store.check(["failure"]):
            return None
        # The same mistake may be about to end this rank by itself.
        if self._woken.wait(2 * _POLL):
            return None
        return str(store.get("failure"), "utf-8")

    def _joined_store(self) -> Any:
        """The store, once it is reached; None if this rank leaves before, or must not join it."""
        while not self._left.is_set():
            try:
                store = joined_store()
                is_joined = self._is_torchruns or is_first_of_its_rank(store)
            except (RuntimeError, ValueError, MemoryError):  # nothing listens yet, or something else does
                self._left.wait(_RETRY)
                continue
            if is_joined:
                return store
            self._wrong_store = (
                f"the job at {address()} has a rank {rank()} already; two processes have RANK={rank()}, or another "
                "job has the same MASTER_PORT: give another one"
            )
            return None
        return None
