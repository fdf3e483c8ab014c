"""Our schedules, installed for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import megatron.seq1f1b


@contextmanager
def installed(**options: int) -> Iterator[None]:
    megatron.seq1f1b.install(**options)
    try:
        yield
    finally:
        megatron.seq1f1b.uninstall()
