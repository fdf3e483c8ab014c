"""Waits for messages, in a thread beside compute."""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

_log = logging.getLogger(__name__)

_SHARE = 0.8  # of the timeout; after the whole timeout NCCL ends the process
_LOOKS = 20  # in that time


class Waits:
    """A thread that runs one wait after another.

    It is a daemon: a program that fails must not wait at its end for messages that no rank receives, as it would for
    the threads of an executor of Python's.
    """

    def __init__(self, name: str) -> None:
        self._waits: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_wait_for_each, args=(self._waits,), name=name, daemon=True).start()
        weakref.finalize(self, self._waits.put, None)

    def submit(self, wait: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._waits.put((future, wait))
        return future


def _wait_for_each(waits: SimpleQueue) -> None:
    while (submitted := waits.get()) is not None:
        future, wait = submitted
        try:
            future.set_result(wait())
        except Exception as error:
            future.set_exception(error)
        del submitted, future, wait  # else the last message lives until the next


def report_if_late(mark: torch.cuda.Event, describe: Callable[[], str], since: float, timeout: timedelta) -> None:
    """Wait until the GPU passes the recorded `mark`; if that takes most of `timeout` from `since`, a time of
    `time.monotonic`, log once which message is late.

    With NCCL no host waits for a message, and NCCL's own report has only a number.
    """
    patience, is_reported = _SHARE * timeout.total_seconds(), False
    while not mark.query():
        waited = time.monotonic() - since
        if waited >= patience and not is_reported:
            is_reported = True
            _log.error(
                "%s has not come for %.0f s; look at its sender, or give a longer --distributed-timeout-minutes than "
                "%g",
                describe(),
                waited,
                timeout.total_seconds() / 60,
            )
        time.sleep(patience / _LOOKS)
