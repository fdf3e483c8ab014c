"""How the ranks of a job leave it one after the other, and how long they wait for those that may have been killed.

Tested in process/test_peers.py by test_rank_0_waits_for_a_rank_while_it_lives.
"""

import time
from collections.abc import Callable
from typing import Any

from .ranks import is_rank_0

PATIENCE = 20.0  # seconds that peers may take to leave
SILENCE = 3.0  # seconds without a sign of life, after which nobody waits for a rank
_POLL = 0.05  # seconds between two looks of a rank that has nothing else to do


class Farewell:
    """Signs of life of this rank in the `store` of a job of `size` ranks, and its last words there."""

    def __init__(self, store: Any, size: int) -> None:
        self._store = store
        self._size = size
        self.rank_0_has_left = False  # known to another rank that has waited for it

    def give_sign(self) -> None:
        """Say that this rank lives."""
        self._store.add("signs of rank 0" if is_rank_0() else "signs of others", 1)

    def say(self, waits_for_rank_0: bool) -> None:
        """Tell the peers that this rank leaves; the last use of the store. Rank 0 waits until the others are done with
        the store, because they would log C++ stacks without it. Raises RuntimeError if the store is gone."""
        if is_rank_0():
            self._store.set("rank 0 has left", "")
            self._wait_for("others", lambda: self._store.add("done", 0) >= self._size - 1)
            return
        if waits_for_rank_0:
            self.rank_0_has_left = self._wait_for("rank 0", lambda: self._store.check(["rank 0 has left"]))
        self._store.add("done", 1)

    def _wait_for(self, peers: str, happened: Callable[[], bool]) -> bool:
        """Wait until it `happened`, or until the `peers`, "rank 0" or "others", give no more signs of life; returns
        whether it happened."""
        start = time.monotonic()
        heard = start
        signs = 0
        while not happened():
            now = time.monotonic()
            latest = self._store.add(f"signs of {peers}", 0)  # adds nothing, and returns their number
            if latest != signs:
                signs = latest
                heard = now
            if now > heard + SILENCE or now > start + PATIENCE:
                return False
            time.sleep(_POLL)
        return True
