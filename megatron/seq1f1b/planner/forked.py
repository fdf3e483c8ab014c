"""Iterators that processes of their own advance."""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from multiprocessing.connection import Connection
from typing import Any

from ..process.child_processes import end_with_parent


def merged[T](iterators: Sequence[Iterable[T]], key: Callable[[T], Any], num_processes: int) -> Iterator[T]:
    """The values of iterators in the ascending order of `key`, in which each iterator has its own. Processes that are
    forked from this one share the iterators, and advance them as far ahead as a pipe holds values. With one process
    nothing is forked. Raises ValueError, which names the flag of `seq1f1b plan`, if a process is killed."""
    if num_processes == 1:
        yield from merge(*iterators, key=key)
        return
    shares = [iterators[first::num_processes] for first in range(min(num_processes, len(iterators)))]
    fork = multiprocessing.get_context("fork")
    processes = []
    streams = []
    try:
        for share in shares:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_send_all, args=(merge(*share, key=key), sender), daemon=True)
            process.start()
            processes.append(process)
            sender.close()  # the process has its own, with which the pipe ends
            streams.append(_received(receiver))
        yield from merge(*streams, key=key)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _send_all(iterator: Iterable[Any], sender: Connection) -> None:
    """Send every value in a tuple of its own, and an empty one at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches all, and the parent acts on it
    end_with_parent()
    for value in iterator:
        sender.send((value,))
    sender.send(())


def _received(receiver: Connection) -> Iterator[Any]:
    with receiver:
        while True:
            try:
                received = receiver.recv()
            except EOFError:
                raise ValueError(
                    "a process of the search ended early, as happens where memory is short; try fewer --workers"
                ) from None
            if not received:
                return
            yield received[0]
