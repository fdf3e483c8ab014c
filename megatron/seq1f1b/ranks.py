"""Which rank this process is, and what only one rank of a job reports."""

import logging
import os


def rank() -> int:
    """The number of this process in its job; known before torch.distributed starts."""
    return int(os.environ.get("RANK", "0"))


def is_rank_0() -> bool:
    """Whether this is the first process of its job."""
    return rank() == 0


def warn_on_rank_0(log: logging.Logger, message: str) -> None:
    """Log a sentence once in a job, as a warning, which Python shows even before logging is set up."""
    if is_rank_0():
        log.warning(message)
