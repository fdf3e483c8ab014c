"""What Megatron is to train: one value, made from arguments or from a program."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from ..partition import segment_multiple
from ..planning.costs import ModelShape
from .model_sizes import layers_per_stage, model_shape
from .supported import BLOCKS


@dataclass(frozen=True)
class MegatronRun:
    """The sizes and the features of one training run of Megatron's.

    `settings` holds the features, by the names of Megatron's arguments; what is missing there is off. `model` is
    None if its sizes are not known; then `layers_per_stage`, the transformer layers in the order of depth, is empty.
    """

    settings: Mapping[str, Any]
    model: ModelShape | None
    layers_per_stage: tuple[int, ...]
    sequence_length: int
    num_microbatches: int
    micro_batch_size: int
    pipeline_parallel_size: int
    num_chunks: int
    tensor_parallel_size: int
    segment_multiple: int
    recomputes_layers: bool


def _segment_multiple(settings: Mapping[str, Any]) -> int:
    """Tokens that every segment has a multiple of.

    In 8 bits, blocks of tokens of all sequences that share a scale stay together.
    """
    tensor = settings["tensor_model_parallel_size"] if settings["sequence_parallel"] else 1
    if settings.get("fp8") and (block := BLOCKS.get(settings.get("fp8_recipe"))):
        tensor *= block // gcd(block, settings.get("micro_batch_size") or 1)
    return segment_multiple(tensor, settings.get("context_parallel_size") or 1)


def megatron_run(settings: Mapping[str, Any], num_microbatches: int) -> MegatronRun:
    """Read the sizes from `settings`, which are by the names of Megatron's arguments."""
    tensor_parallel_size = settings["tensor_model_parallel_size"]
    has_sizes = settings.get("padded_vocab_size") is not None
    return MegatronRun(
        settings=settings,
        model=model_shape(settings) if has_sizes else None,
        layers_per_stage=layers_per_stage(settings) if has_sizes else (),
        sequence_length=settings["seq_length"],
        num_microbatches=num_microbatches,
        micro_batch_size=settings.get("micro_batch_size") or 1,
        pipeline_parallel_size=settings["pipeline_model_parallel_size"],
        num_chunks=settings.get("virtual_pipeline_model_parallel_size") or 1,
        tensor_parallel_size=tensor_parallel_size,
        segment_multiple=_segment_multiple(settings),
        recomputes_layers=settings.get("recompute_granularity") == "full",
    )
