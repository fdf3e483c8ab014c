"""Turns flags into one frozen PipelineConfig.

Start with flags (ours), megatron_run (Megatron's training run), supported (features that exclude each other) and
config.
"""

from .config import PipelineConfig, pipeline_config
from .flags import AUTO, add_arguments, keywords_in_errors, parse_options
from .megatron_run import MegatronRun, device_memory, gpu_name, is_on_cpu, run_of_arguments, run_of_program
