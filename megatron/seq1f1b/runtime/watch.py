"""Names the message that a GPU waits for in vain: with NCCL no host waits, and NCCL's own report has only a number."""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol

_log = logging.getLogger(__name__)

# NCCL ends the process when the whole time is over.
_SHARE = 0.8
_LOOKS = 20  # in that time


class Mark(Protocol):
    """A place in a stream of a GPU, such as a recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the GPU has passed it."""


class _Wait(NamedTuple):
    mark: Mark
    describe: Callable[[], str]
    since: float


class Watch:
    """Logs a message, once, that did not come in most of `timeout`.

    A daemon thread looks at marks behind the receives, so that neither the host waits nor a message is held. It calls
    `on_start` first.
    """

    def __init__(self, timeout: timedelta, on_start: Callable[[], None] = lambda: None) -> None:
        self._waits: deque[_Wait] = deque()
        ended = threading.Event()
        arguments = on_start, self._waits, _SHARE * timeout.total_seconds(), timeout, ended
        threading.Thread(target=_look_now_and_then, args=arguments, name="receives", daemon=True).start()
        weakref.finalize(self, ended.set)

    def expect(self, mark: Mark, describe: Callable[[], str]) -> None:
        """The GPU passes `mark` when the message that `describe()` names is there."""
        self._waits.append(_Wait(mark, describe, time.monotonic()))


def _look_now_and_then(
    on_start: Callable[[], None], waits: deque[_Wait], patience: float, timeout: timedelta, ended: threading.Event
) -> None:
    on_start()
    reported = None
    while not ended.wait(patience / _LOOKS):
        while waits and waits[0].mark.query():
            waits.popleft()
        if not waits or waits[0] is reported or time.monotonic() - waits[0].since < patience:
            continue
        reported = waits[0]
        _log.error(
            "%s has not come for %.0f s; look at its sender, or give a longer --distributed-timeout-minutes than %g",
            reported.describe(),
            time.monotonic() - reported.since,
            timeout.total_seconds() / 60,
        )
