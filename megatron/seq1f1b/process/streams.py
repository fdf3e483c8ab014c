"""Standard streams that take whatever is printed, so that no sentence is lost to the stream that it is printed to."""

import os
import sys
from contextlib import suppress


def prepare_streams() -> None:
    """Open those that the shell has closed (`>&-`), on nothing, and let the others print bytes of paths that are no
    text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # what a program has put in its place may have no encoding
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
