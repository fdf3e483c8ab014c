"""Turns our flags and Megatron's run into one frozen PipelineConfig; refuses features that exclude each other."""

from .config import PipelineConfig, pipeline_config
from .flags import AUTO, add_arguments, parse_options
from .megatron_run import MegatronRun, device_memory, gpu_name, is_on_cpu, run_of_arguments, run_of_program
