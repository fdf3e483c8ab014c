"""Our schedules in a program that uses megatron-core without megatron.training, and so without its arguments.

The program gives our flags as keywords of `install`. What Megatron's arguments would say of the model, its own
configuration says, so that the same table of refusals and the same strategies of cutting hold.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from .arguments import pipeline_config, problem
from .runtime import PipelineExecutor, Tracer

# Fields of a TransformerConfig whose names differ from those of Megatron's arguments.
_NAMES = {
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}


class LibrarySchedule:
    """Called like Megatron's `forward_backward_func`. `options` are our parsed flags, and `placement`."""

    def __init__(self, options: Namespace) -> None:
        if options.pipeline_schedule is None and options.pipeline_schedule_file is None:
            options.pipeline_schedule = "1f1b"
        self._options = options
        self._run: Callable | None = None
        self._training_steps = 0

    def __call__(self, *, model: Any, num_microbatches: int, forward_only: bool = False, **step: Any) -> list[Any]:
        """Run one step. The first raises ValueError for what cannot be honoured."""
        step |= {"model": model, "num_microbatches": num_microbatches, "forward_only": forward_only}
        if self._run is None:
            self._run = self._executor(**step)
        self._training_steps += not forward_only
        return self._run(**step)

    def _executor(self, *, model: Any, **step: Any) -> PipelineExecutor:
        args = as_arguments(self._options, model, **step)
        message = problem(args)
        if message is not None:
            raise ValueError(message)
        config = pipeline_config(args)
        tracer = None
        if config.trace_directory is not None:
            tracer = Tracer(config.trace_directory, config.trace_iterations, lambda: self._training_steps)
        return PipelineExecutor(
            config.read_schedule(),
            config.num_segments,
            cache(config.cut),
            tracer=tracer,
            costs=None if config.model is None else config.action_costs,
            placement=config.placement,
        )


def as_arguments(
    options: Namespace,
    model: torch.nn.Module | list[torch.nn.Module],
    *,
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    **_: Any,
) -> Namespace:
    """Our flags beside what Megatron's arguments would say of this model and step."""
    chunks = model if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    fields = {_NAMES.get(name, name): value for name, value in vars(config).items()}
    fields |= {
        "virtual_pipeline_model_parallel_size": len(chunks) if len(chunks) > 1 else None,
        "group_query_attention": fields.get("num_query_groups") != fields.get("num_attention_heads"),
        # The configuration names the default, whatever the model is made of.
        "transformer_impl": "transformer_engine" if any(map(_has_transformer_engine, chunks)) else "local",
        "distributed_backend": dist.get_backend(),
        "seq_length": seq_length or 0,
        "micro_batch_size": micro_batch_size or 1,
        "global_batch_size": num_microbatches * (micro_batch_size or 1),
        "data_parallel_size": 1,
        "step_batch_size_schedule": None,
    }
    fields["padded_vocab_size"] = _attribute(chunks[0], "vocab_size")
    fields["position_embedding_type"] = _attribute(chunks[0], "position_embedding_type")
    return Namespace(**{**fields, **vars(options)})


def _has_transformer_engine(chunk: torch.nn.Module) -> bool:
    return any("transformer_engine" in kind.__module__ for part in chunk.modules() for kind in type(part).__mro__)


def _attribute(chunk: torch.nn.Module, name: str) -> Any:
    try:
        return get_attr_wrapped_model(chunk, name)
    except RuntimeError:
        return None
