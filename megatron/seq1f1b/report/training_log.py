"""Times and losses of a run, from Megatron's training log."""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_ITERATION = re.compile(
    r"iteration +\d+/.*elapsed time per iteration \(ms\): (?P<ms>[.\d]+).*global batch size: +(?P<batch>\d+)"
    r".*lm loss: (?P<loss>[-+.\dE]+|NAN|-?INF) "
)
_SEQUENCE_LENGTH = re.compile(r"^ *seq_length \.+ (\d+)", re.MULTILINE)

# The first iterations allocate buffers and connect ranks.
_WARM_UP = 2


@dataclass(frozen=True)
class TrainingLog:
    """Per iteration: the loss, and the time in seconds."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens_per_iteration: int

    @property
    def seconds_per_iteration(self) -> float:
        """The median, without the iterations that warm up if there are others."""
        return median(self.seconds[_WARM_UP:] or self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_iteration / self.seconds_per_iteration


def read_training_log(path: Path) -> TrainingLog:
    """Read a log that was written with --log-interval 1. Raises ValueError if it holds no iteration."""
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = [match.groupdict() for match in _ITERATION.finditer(text)]
    length = _SEQUENCE_LENGTH.search(text)
    if not rows or length is None:
        raise ValueError(
            f"{path} holds no training iteration with its loss; was the run started with --log-interval 1?"
        )
    return TrainingLog(
        losses=tuple(float(row["loss"]) for row in rows),
        seconds=tuple(float(row["ms"]) / 1e3 for row in rows),
        tokens_per_iteration=int(rows[0]["batch"]) * int(length[1]),
    )
