"""The reason why a step failed, for the ranks that only see the failed rank vanish.

A library has no net that ends its ranks together (net.py). When a rank fails, those that wait for its messages get an
error of the transport, which explains nothing. So the rank that failed leaves its error in the store of
torch.distributed, and the others raise that.
"""

import time
from contextlib import suppress
from functools import partial
from typing import Any

from .causes import LostPeer, has_lost_a_peer, in_plain_words
from .threads import in_time

_PATIENCE = 5.0  # seconds
_POLL = 0.05


def explained(error: BaseException, step: str) -> BaseException:
    """The error to raise on this rank instead of `error`, which ended a step; `step` is its name on all ranks.

    If this rank itself failed, its error is left in the store for the others, and returned. If the error only says that
    another rank is gone, a LostPeer is returned, with what that rank has left, or else with advice where to look.
    """
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    key = f"seq1f1b/failure of {step}"
    if not has_lost_a_peer(error):
        words = f"rank {dist.get_rank()} failed in this step: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the process that holds the store may have ended, or be stopped
            in_time(_PATIENCE, partial(store.set, key, words))
        return error
    words = in_plain_words(str(error))
    with suppress(RuntimeError):
        words = in_time(_PATIENCE, partial(_left_by_failed_rank, store, key)) or words
    lost_peer = LostPeer(words)
    for note in getattr(error, "__notes__", ()):
        lost_peer.add_note(note)
    return lost_peer


def _left_by_failed_rank(store: Any, key: str) -> str:
    """What the rank that failed has left in the store; empty if it leaves nothing for a while. Its connections may
    break a little earlier."""
    end = time.monotonic() + _PATIENCE / 2
    while time.monotonic() < end:
        if store.check([key]):
            return str(store.get(key), "utf-8")
        time.sleep(_POLL)
    return ""
