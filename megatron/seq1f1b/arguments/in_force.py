"""The values that are in force, with defaults filled in."""

from typing import Any

from ..schedule import Given
from .config import PipelineConfig


def in_force(config: PipelineConfig) -> dict[str, Any]:
    """Values for parsed arguments, by their names; none where Megatron's own schedule runs."""
    if config.schedule is None:
        return {}
    found: dict[str, Any] = {"sequence_splits": config.num_segments}
    if not isinstance(config.schedule, Given):
        found["pipeline_schedule"] = config.schedule.name
    if config.num_segments > 1 and config.partition.file is None:
        found["sequence_split_strategy"] = config.partition.strategy
    return found
