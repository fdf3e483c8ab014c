"""The progress of a search, on a terminal.

Tested in commands/test_plan.py by test_a_map_is_continued_where_it_was_left.
"""

import sys
from time import monotonic


def show(done: int, total: int) -> None:
    """A bar of progress on a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r[{'#' * round(30 * done / total):30}]", end=end, file=sys.stderr, flush=True)


class Progress:
    """On a terminal, twice a second: how many candidates are left to look at. Each may be several configurations, or
    be left out by its bound."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._next = 0.0

    def __call__(self, left: int) -> None:
        if self._is_shown and monotonic() >= self._next:
            self._next = monotonic() + 0.5
            print(f"\r{left:9,} candidates are left", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_shown:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
