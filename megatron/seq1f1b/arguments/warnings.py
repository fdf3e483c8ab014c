"""What a configuration does that its user may not expect, logged on rank 0."""

import argparse

from .config import PipelineConfig
from .equal_lengths import warn_of_equal_lengths
from .short_segments import warn_of_short_segments
from .unused_flags import warn_of_unused_flags


def log_warnings(config: PipelineConfig, flags: argparse.Namespace) -> None:
    """To be called once in a process."""
    warn_of_short_segments(config, flags)
    warn_of_equal_lengths(config)
    warn_of_unused_flags(config, flags)
