"""Unsupported flags end a training script at start-up: one sentence on rank 0, a non-zero exit on all ranks."""

import argparse
import sys
import time

from ..ranks import is_rank_0
from .config import PipelineConfig, pipeline_config
from .from_arguments import run_of_arguments

# On failure the launcher ends all ranks as soon as one is gone; the others leave rank 0 the time to say why.
_SECONDS_FOR_RANK_0 = 20


def validate(args: argparse.Namespace) -> PipelineConfig:
    """The configuration that the parsed arguments, Megatron's and ours, stand for; ends the program if there is none.

    Sets `args.sequence_splits` where the number of segments was left to be found.
    """
    try:
        config = pipeline_config(args, run_of_arguments(args))
    except ValueError as error:
        if is_rank_0():
            print(f"error: {str(error).rstrip('.')}.", file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_FOR_RANK_0)
        raise SystemExit(2) from None
    if config.num_segments > 1:
        args.sequence_splits = config.num_segments
    return config
