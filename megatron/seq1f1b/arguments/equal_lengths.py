"""A warning where the authors' flag cuts into equal lengths, with what these cost."""

import logging
from dataclasses import replace

from ..ranks import is_rank_0, warn_on_rank_0
from .config import PipelineConfig
from .forecast import forecast

_log = logging.getLogger(__name__)

# Differences below this are not worth a line.
_WORTH_A_WARNING = 0.01


def warn_of_equal_lengths(config: PipelineConfig) -> None:
    """To be called once in a process."""
    schedule, run = config.schedule, config.run
    if not config.takes_authors_default or config.num_segments == 1 or run.model is None or not is_rank_0():
        return
    assert schedule is not None, "segments have a schedule"
    better = replace(config.partition, strategy="balanced")
    try:
        cuts = config.lengths, better.cut(run.sequence_length)
        equal, balanced = (forecast(config.partition, schedule, lengths).seconds for lengths in cuts)
    except ValueError:  # what segments of this model cost is not known
        return
    if equal > (1 + _WORTH_A_WARNING) * balanced:
        warn_on_rank_0(
            _log,
            f"--pipe-sp-splits alone cuts into equal lengths, with which the predicted step takes "
            f"{100 * (equal / balanced - 1):.0f} % longer than with --pipe-sp-strategy balanced",
        )
