"""The store of a job at MASTER_ADDR and MASTER_PORT: how it is hosted and joined, and what else may listen there.

Tested in process/test_peers.py by test_a_program_that_holds_the_port_and_is_mute_is_named.
"""

import os
import socket
import time
from datetime import timedelta
from functools import partial
from typing import Any

from .ranks import rank
from .threads import in_time

MUTE = 60.0  # seconds in which whatever listens at the address of the store must answer like a store
_PATIENCE = 20.0  # seconds that a connection may take


def hosted_store() -> Any:
    """The store of the job, hosted in this process, which is rank 0. Raises ValueError if this process cannot reach it
    at its address, since then no other rank can."""
    try:
        return in_time(MUTE, partial(_store, is_master=True))
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise ValueError(
                f"MASTER_PORT={os.environ['MASTER_PORT']} is in use on {socket.gethostname()}, where rank 0 runs, by "
                "another job or program; give another MASTER_PORT"
            ) from None
        raise ValueError(
            f"rank 0 runs on {socket.gethostname()}, but does not reach itself at {address()}; MASTER_ADDR must name "
            "the host of rank 0, and MASTER_PORT a port that may be opened there"
        ) from error


def joined_store() -> Any:
    """The store of the job, which rank 0 or torchrun hosts. Raises RuntimeError or ValueError if none answers there."""
    return _store(is_master=False)


def _store(is_master: bool) -> Any:
    """The store of the job; a job that torchrun starts again has another prefix."""
    import torch.distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=MUTE),
    )
    prefix = f"seq1f1b/{os.environ['WORLD_SIZE']} ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)


def is_first_of_its_rank(store: Any) -> bool:
    """Whether no other process has joined this store as this rank; torchrun's outlives those that it starts anew."""
    here = f"{socket.gethostname()}:{os.getpid()}"
    return bool(str(store.compare_set(f"process of rank {rank()}", "", here), "utf-8") == here)


def address() -> str:
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"


class Listener:
    """Watches what listens at the address of the store, by a connection of its own beside those of torch. torch waits
    for ever for a program that accepts connections and never answers, and keeps trying one that closes them at once."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self.problem = ""  # of the latest connection that was not accepted
        self._since: float | None = None  # when the first of the connections was accepted, if all later ones were

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: Any) -> None:
        self._close()

    def silence(self) -> float:
        """For how many seconds connections have been accepted, whether or not they were closed again; 0 if the latest
        one was refused, as before rank 0 has started."""
        if self._connection is not None and _is_closed(self._connection):
            self._close()
        if self._connection is None:
            try:
                address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
                self._connection = socket.create_connection(address, timeout=_PATIENCE)
                self._connection.setblocking(False)
            except OSError as error:
                self.problem = error.strerror or str(error)
                self._since = None
                return 0.0
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection on which it never sent anything."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
