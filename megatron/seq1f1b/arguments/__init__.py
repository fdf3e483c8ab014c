"""The front hall: from flags to one frozen PipelineConfig.

Start with flags (ours), megatron_run (what Megatron is to train), supported (what goes together) and config.
"""

from .config import PipelineConfig, pipeline_config
from .flags import add_arguments, has_our_flags, parse_options
from .from_arguments import run_of_arguments
from .megatron_run import MegatronRun
from .naming import Naming

__all__ = [
    "MegatronRun",
    "Naming",
    "PipelineConfig",
    "add_arguments",
    "has_our_flags",
    "parse_options",
    "pipeline_config",
    "run_of_arguments",
]
