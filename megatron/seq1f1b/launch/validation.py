"""From Megatron's arguments to the configuration of a run.

Tested in arguments/test_config.py by test_what_validate_made_is_what_everybody_gets.
"""

from argparse import Namespace

from ..arguments import PipelineConfig, pipeline_config, run_of_arguments
from ..arguments.checks import check_late_mistakes
from ..costs.run_costs import RunCosts
from ..process.ranks import is_rank_0, warn_on_rank_0
from .summary import advice, summary


def validated(args: Namespace) -> PipelineConfig:
    """The configuration of the parsed arguments, Megatron's and ours; raises ValueError for what is unsupported. Rank 0
    prints it."""
    costs = RunCosts(args, run_of_arguments(args))
    config = configured(costs)
    check_late_mistakes(args)
    vars(args).update(config.in_force())
    if config.schedule is not None and is_rank_0() and not args.dry_run:
        from .attention_kernel import attention_kernel  # imports torch

        print(summary(config, costs, attention_kernel(config)), flush=True)
    return config


def configured(costs: RunCosts) -> PipelineConfig:
    """The configuration of our parsed flags; rank 0 logs what the user may not expect of it."""
    config = pipeline_config(costs.flags, costs.run, costs)
    for sentence in advice(config, costs):
        warn_on_rank_0(f"{sentence}.")
    return config
