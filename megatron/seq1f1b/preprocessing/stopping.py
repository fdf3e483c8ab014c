"""The ways in which a run ends early: refused with one sentence, or stopped by a signal."""

import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Refused(Exception):
    """The run cannot go on; the text is the one sentence that the user reads."""


def refuse_existing(paths: Iterable[Path], overwrite: bool, flag: str) -> None:
    for path in paths:
        if path.is_dir():
            raise Refused(f"{path} is a folder: choose another {flag}.")
        if path.exists() and not overwrite:
            raise Refused(f"{path} exists: choose another {flag}, or add --overwrite.")


def stop(number: int, _frame: object) -> None:
    """Signal handler: leave by an exception, so that every context cleans up."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    name = signal.Signals(number).name
    print(f"\npreprocess_data: stopped by {name}, nothing left behind.", file=sys.stderr)
    raise SystemExit(128 + number)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals that would stop the run wait until the block is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
