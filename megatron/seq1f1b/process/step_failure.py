"""The reason why a step failed, told to the ranks that only see the failed one go.

A program has no net that ends its ranks together (net.py): a rank that waits for a message of one that failed gets an
error of the transport, which names nothing. The store of torch.distributed brings it the words of the other.
"""

import time
from contextlib import suppress
from functools import partial
from typing import Any

from .causes import LostPeer, has_lost_a_peer, plain
from .job_store import in_time

_PATIENCE = 5.0  # seconds
_POLL = 0.05


def explained(error: BaseException, step: str) -> BaseException:
    """The error to raise on this rank, for one that ended `step`, a name that all ranks have for it: the error itself,
    after telling the others; or, if it only says that another rank is gone, one with the words of that rank, or where
    these are gone with it, one that says where to look."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    key = f"seq1f1b/failure of {step}"
    if not has_lost_a_peer(error):
        words = f"rank {dist.get_rank()} failed in this step: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the process that holds the store may have ended, or be stopped
            in_time(_PATIENCE, partial(store.set, key, words))
        return error
    words = plain(str(error))
    with suppress(RuntimeError):
        words = in_time(_PATIENCE, partial(_told, store, key)) or words
    lost_peer = LostPeer(words)
    for note in getattr(error, "__notes__", ()):
        lost_peer.add_note(note)
    return lost_peer


def _told(store: Any, key: str) -> str:
    """The words of a rank that failed, which may come a little later than its end is seen; empty if there are none."""
    end = time.monotonic() + _PATIENCE / 2
    while time.monotonic() < end:
        if store.check([key]):
            return str(store.get(key), "utf-8")
        time.sleep(_POLL)
    return ""
