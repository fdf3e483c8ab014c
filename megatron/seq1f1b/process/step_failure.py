"""The reason why a step failed, for the ranks that only see the failed rank vanish.

A library has no net that ends its ranks together (net.py). When a rank fails, those that wait for its messages get an
error of the transport, which explains nothing. So the rank that failed leaves its error in the store of
torch.distributed, and the others raise that. While all ranks wait for one another before a step, as for a long search
of its schedule, each leaves a note of what it does: if the wait fails, they say who waited for what.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from .causes import LostPeer, has_lost_a_peer, in_plain_words
from .threads import in_time

_PATIENCE = 5.0  # seconds
_POLL = 0.05


def leave_note(words: str) -> None:
    """Tell all ranks what this one does, for the case that their wait for one another fails; "" once it is over."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):  # the process that holds the store may have ended, or be stopped
        in_time(_PATIENCE, partial(store.set, _key_of_note(dist.get_rank()), words))


def _key_of_note(rank: int) -> str:
    return f"seq1f1b/note of rank {rank}"


def explained(error: BaseException, step: str, ranks: Iterable[int]) -> BaseException:
    """The error to raise on this rank instead of `error`, which ended a step; `step` is its name on all ranks.

    If this rank itself failed, its error is left in the store for the others, and returned. If the error only says that
    another rank is gone, a LostPeer is returned, with what that rank has left, or else with advice where to look and
    the notes of these `ranks`.
    """
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    key = f"seq1f1b/failure of {step}"
    if not has_lost_a_peer(error):
        words = f"rank {dist.get_rank()} failed in this step: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the process that holds the store may have ended, or be stopped
            in_time(_PATIENCE, partial(store.set, key, words))
        return error
    left = ""
    notes: list[str] = []
    with suppress(RuntimeError):
        left = in_time(_PATIENCE, partial(_left_by_failed_rank, store, key))
        if not left:
            notes = in_time(_PATIENCE, partial(_notes, store, ranks))
    lost_peer = LostPeer(left or "; ".join([in_plain_words(str(error)), *notes]))
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


def _notes(store: Any, ranks: Iterable[int]) -> list[str]:
    """What the ranks that wait, or let others wait, have left in the store."""
    notes = [str(store.get(key), "utf-8") for key in map(_key_of_note, ranks) if store.check([key])]
    return [note for note in notes if note]
