"""Processes that a rank starts end with it.

The writers of checkpoints and the readers of data are daemons of their rank, but a rank that is killed cannot end its
daemons.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from .threads import start_thread


def start_process(upstream: Callable[[Any], None], process: Any) -> None:
    """Wraps `BaseProcess.start`, so that the new process ends with this one, also when this one is killed."""
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

    start_thread(end)
