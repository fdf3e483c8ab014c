"""Our flags, checked against all of Megatron's."""

import argparse

from ..arguments import PipelineConfig, pipeline_config, run_of_arguments
from ..arguments.in_force import in_force
from ..arguments.warnings import log_warnings
from ..ranks import is_rank_0
from .ending import end
from .summary import summary


def validate(args: argparse.Namespace) -> PipelineConfig:
    """The configuration that the parsed arguments, Megatron's and ours, stand for; ends the program if there is none.

    Sets in `args` what was left to be found, and prints on rank 0 what runs.
    """
    try:
        config = pipeline_config(args, run_of_arguments(args))
    except ValueError as error:
        end(str(error), error)
    log_warnings(config, args)
    vars(args).update(in_force(config))
    if config.schedule is not None and is_rank_0() and not args.dry_run:
        print(summary(config), flush=True)
    return config
