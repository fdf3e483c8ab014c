"""Sequence-level pipeline parallelism for Megatron: schedules as data, run beside the released megatron-core.

A training script calls `install()` before it imports Megatron, gives `add_arguments` to Megatron's parser as its extra
arguments provider, and calls `validate` with the parsed arguments. `pipeline_config()` returns the result again. A
program without Megatron's arguments calls `install` with our flags as keywords, and nothing else. docs/library.md lists
all public names.
"""

try:
    from .arguments import PipelineConfig, add_arguments
    from .launch import (
        install,
        local_hybrid_spec,
        pipeline_config,
        token_log_probs,
        token_log_probs_and_entropy,
        uninstall,
        use_segment_attention,
        validate,
        whole_weights,
    )
except (ImportError, AttributeError) as error:
    from .process.causes import hidden_package

    sentence = hidden_package(error)  # such as numpy.py beside the script
    if sentence is None:
        raise
    raise ImportError(sentence) from None

__version__ = "0.2.0"

__all__ = [
    "PipelineConfig",
    "add_arguments",
    "install",
    "local_hybrid_spec",
    "pipeline_config",
    "token_log_probs",
    "token_log_probs_and_entropy",
    "uninstall",
    "use_segment_attention",
    "validate",
    "whole_weights",
]
