"""Threads beside the main one, which must not wait for ever for them: neither for their start nor for their results.

`threading.Thread.start` waits until the new thread has run its first lines. Where memory runs out between the stack of
a thread and these lines, it waits for ever (github.com/python/cpython/issues/140746). None of these threads keeps the
process from ending.
"""

import _thread
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_PATIENCE = 20.0  # seconds that a thread may take to start


def start_thread(run: Callable[[], Any], patience: float = _PATIENCE) -> None:
    """Let a new thread call `run()`. Raises RuntimeError if it does not start within `patience` seconds."""
    started = threading.Lock()
    started.acquire()

    def run_in_thread() -> None:
        started.release()
        run()

    _thread.start_new_thread(run_in_thread, ())
    if not started.acquire(timeout=patience):
        raise RuntimeError("can't start new thread: it has no memory for its first lines")


def in_time[T](seconds: float, call: Callable[[], T], source: str = "") -> T:
    """The result of `call()`, which a thread calls; raises RuntimeError, which names the `source` of the result, if it
    takes longer, or if no thread can be started."""
    result: Future[T] = Future()
    start_thread(lambda: _resolve(result, call), seconds)
    try:
        return result.result(seconds)
    except TimeoutError:
        from_source = f" from {source}" if source else ""
        raise RuntimeError(f"no answer{from_source} for {seconds:g} s") from None


def one_after_another() -> Callable[[Callable[[], Any]], Future[Any]]:
    """A function that hands a call to one thread, which runs calls in their order. Unlike the threads of Python's
    executors it is a daemon: a program that fails must not wait at its end for messages that no rank receives."""
    calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def run_each() -> None:
        while True:
            future, call = calls.get()
            _resolve(future, call)
            del future, call  # else the last message lives until the next

    def submit(call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        calls.put((future, call))
        return future

    start_thread(run_each)
    return submit


def _resolve(future: Future[Any], call: Callable[[], Any]) -> None:
    """Give the result of `call()`, or its error, to whoever waits for the `future`."""
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        del future, call  # else the traceback of the error would keep them, and they the error
    else:
        future.set_result(result)
