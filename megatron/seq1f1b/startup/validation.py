"""Our flags, checked against all of Megatron's."""

import argparse

from ..arguments import PipelineConfig, pipeline_config, run_of_arguments
from ..arguments.short_segments import warn_of_short_segments
from .ending import end


def validate(args: argparse.Namespace) -> PipelineConfig:
    """The configuration that the parsed arguments, Megatron's and ours, stand for; ends the program if there is none.

    Sets `args.sequence_splits` where the number of segments was left to be found.
    """
    try:
        config = pipeline_config(args, run_of_arguments(args))
    except ValueError as error:
        end(str(error), error)
    warn_of_short_segments(config)
    if config.num_segments > 1:
        args.sequence_splits = config.num_segments
    return config
