"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


@dataclass
class Counts:
    """What was written, and how many documents were skipped, by reason."""

    documents: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.skipped += other.skipped


class Progress:
    """Progress over `total` bytes of input."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._documents = 0
        self._began = self._shown = time.monotonic()
        self._bar = tqdm(total=total, unit="B", unit_scale=True, disable=None)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def update(self, size: int, counts: Counts) -> None:
        """Count `size` more bytes as done; `counts` holds the results so far."""
        self._done += size
        now = time.monotonic()
        seconds = max(now - self._began, 1e-3)
        words = f"{counts.documents:,} documents, {counts.documents / seconds:,.0f}/s, {counts.tokens:,} tokens"
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.update(size)
        if self._bar.disable and now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            share = self._done / self._total if self._total else 1.0
            speed = self._done / seconds / 1e6
            print(f"{share:4.0%}: {words}, {speed:.2f} MB/s", file=sys.stderr, flush=True)
