"""Flags that have no effect beside others."""

import argparse
import logging

from ..ranks import warn_on_rank_0
from ..schedule import Planned
from .config import PipelineConfig
from .supported import Scope, first_unsupported

_log = logging.getLogger(__name__)


def warn_of_unused_flags(config: PipelineConfig, flags: argparse.Namespace) -> None:
    """Log on rank 0 which of our flags have no effect; to be called once in a process."""
    if flags.pipeline_schedule_file is not None and flags.pipeline_schedule is not None:
        warn_on_rank_0(
            _log, f"--pipeline-schedule-file takes the place of --pipeline-schedule {flags.pipeline_schedule}."
        )
    is_planned = isinstance(config.schedule, Planned)
    if flags.sequence_split_profile is not None and not is_planned and not config.partition.uses_profile:
        warn_on_rank_0(_log, "--sequence-split-profile has no effect: these cuts follow no measured times.")
    if is_planned and not config.schedule.split:
        obstacle = first_unsupported(config.run.settings, {Scope.SPLIT_BACKWARDS})
        warn_on_rank_0(_log, f"--pipeline-schedule auto plans without splitting backwards: {obstacle}.")
