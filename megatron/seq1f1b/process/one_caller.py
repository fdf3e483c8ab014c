"""Steps are run by one thread of one process."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
