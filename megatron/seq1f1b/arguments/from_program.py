"""Megatron's run, from the model of a program that uses megatron-core without megatron.training and its arguments."""

from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from .megatron_run import MegatronRun, megatron_run

# Fields of a TransformerConfig whose names differ from those of Megatron's arguments.
_NAMES = {
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}


def run_of_program(
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int | None,
    micro_batch_size: int | None,
    keep_documents_apart: bool = False,
) -> MegatronRun:
    """The run that the configuration of the model chunks and the sizes of a step describe."""
    chunks = model if isinstance(model, list) else [model]
    fields = vars(get_model_config(chunks[0]))
    settings = {_NAMES.get(name, name): value for name, value in fields.items()}
    settings |= {
        "reset_attention_mask": keep_documents_apart,
        "virtual_pipeline_model_parallel_size": len(chunks),
        "group_query_attention": fields.get("num_query_groups") != fields.get("num_attention_heads"),
        # The configuration names the default, whatever the model is made of.
        "transformer_impl": "transformer_engine" if any(map(_has_transformer_engine, chunks)) else "local",
        "distributed_backend": dist.get_backend(),
        "micro_batch_size": micro_batch_size,
        "seq_length": seq_length or 0,  # left out where no message is sent
        "padded_vocab_size": _attribute(chunks[0], "vocab_size"),
        "position_embedding_type": _attribute(chunks[0], "position_embedding_type"),
    }
    return megatron_run(MappingProxyType(settings), num_microbatches)


def _has_transformer_engine(chunk: torch.nn.Module) -> bool:
    return any("transformer_engine" in kind.__module__ for part in chunk.modules() for kind in type(part).__mro__)


def _attribute(chunk: torch.nn.Module, name: str) -> Any:
    try:
        return get_attr_wrapped_model(chunk, name)
    except RuntimeError:
        return None
