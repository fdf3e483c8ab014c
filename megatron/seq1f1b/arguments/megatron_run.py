"""The training run of Megatron and its device: one value, made from arguments or from a program.

Tested in arguments/test_config.py.
"""

import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..partition import segment_multiple
from ..process.flag_names import ARGUMENTS_OF_FIELDS
from ..schedule import Placement, Shape
from .flags import DEVICE_MEMORY
from .layer_layout import stages_of_layout
from .unsupported import BLOCKS

if TYPE_CHECKING:
    from torch.nn import Module

_GIB = 2**30
_USUAL_LENGTH = 2**15  # tokens of a sequence, where a program does not say


@dataclass(frozen=True)
class MegatronRun:
    """The sizes of one training run of Megatron's, and its `settings` by the names of Megatron's arguments; a missing
    one is off. `layers_per_stage` counts transformer layers by depth and is empty for a model of unknown sizes. Segment
    lengths are multiples of `segment_multiple`."""

    settings: Mapping[str, Any]
    layers_per_stage: tuple[int, ...]
    sequence_length: int
    num_microbatches: int
    micro_batch_size: int
    pipeline_parallel_size: int
    num_chunks: int
    tensor_parallel_size: int
    segment_multiple: int

    @property
    def has_sizes(self) -> bool:
        return bool(self.layers_per_stage)

    def shape(self, style: str, num_segments: int) -> Shape:
        """The shape of a step with model chunks placed in this `style` of a `Placement`."""
        placement = Placement(self.pipeline_parallel_size, self.num_chunks, style)
        return Shape(placement, self.num_microbatches, num_segments)


def settings_of_launch(args: Namespace) -> dict[str, Any]:
    """Megatron's parsed arguments by their names; in a rehearsal, those of the real launch."""
    settings = dict(vars(args))
    if settings.get("dry_run") and args.device != "cpu":
        settings |= args.replaced_on_cpu
    return settings


def run_of_arguments(args: Namespace) -> MegatronRun:
    """The run of Megatron's parsed and validated arguments; in a rehearsal, that of the real launch."""
    settings = settings_of_launch(args)
    num_microbatches = 1
    batch = settings.get("global_batch_size") or 0
    at_once = (settings.get("micro_batch_size") or 0) * (settings.get("data_parallel_size") or 0)
    if at_once:
        num_microbatches = max(1, batch // at_once)
    return run_of_settings(settings, num_microbatches)


def run_of_program(
    model: "Module | list[Module]",
    num_microbatches: int,
    seq_length: int | None,
    micro_batch_size: int | None,
    keep_documents_apart: bool = False,
) -> MegatronRun:
    """The run of a program, from the configuration of its model and the sizes of a step."""
    import torch.distributed as dist
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    chunks = model if isinstance(model, list) else [model]
    wrapper = getattr(chunks[0], "ddp_config", None)
    fields = ({} if wrapper is None else vars(wrapper)) | vars(get_model_config(chunks[0]))
    settings = {ARGUMENTS_OF_FIELDS.get(name, name): value for name, value in fields.items()}
    settings |= {
        "keep_documents_apart": keep_documents_apart,
        "partition_state": hasattr(chunks[0], "partitioned_state"),
        "virtual_pipeline_model_parallel_size": len(chunks),
        "group_query_attention": fields.get("num_query_groups") != fields.get("num_attention_heads"),
        # The configuration has the default, whichever layers the model has.
        "transformer_impl": "transformer_engine" if _have_transformer_engine(chunks) else "local",
        "distributed_backend": dist.get_backend(),
        "micro_batch_size": micro_batch_size,
        # The calls of the model tell the lengths; features are checked, and costs predicted, for a usual one.
        "seq_length": _USUAL_LENGTH if fields.get("variable_seq_lengths") or not seq_length else seq_length,
    }
    # What the configuration lacks; a model that is no Megatron's has neither.
    with suppress(RuntimeError):
        settings["padded_vocab_size"] = get_attr_wrapped_model(chunks[0], "vocab_size")
    with suppress(RuntimeError):
        settings["position_embedding_type"] = get_attr_wrapped_model(chunks[0], "position_embedding_type")
    return run_of_settings(settings, num_microbatches)


def _have_transformer_engine(chunks: "list[Module]") -> bool:
    kinds = {type(part) for chunk in chunks for part in chunk.modules()}
    return any("transformer_engine" in parent.__module__ for kind in kinds for parent in kind.__mro__)


def run_of_settings(settings: Mapping[str, Any], num_microbatches: int) -> MegatronRun:
    """The run of settings by the names of Megatron's arguments."""
    cp_comm_type = settings.get("cp_comm_type") or "p2p"  # Transformer Engine's default
    rows_multiple = settings["tensor_model_parallel_size"] if settings["sequence_parallel"] else 1
    block = BLOCKS.get(settings.get("fp8_recipe") or "")
    if settings.get("fp8") and block is not None:
        # Tokens that share a scale stay in one segment: a rank's rows times sequences are a multiple of the block.
        sequences = settings.get("micro_batch_size") or block
        in_evaluation = settings.get("eval_micro_batch_size") or block
        rows_multiple *= block // gcd(block, sequences, in_evaluation)
    return MegatronRun(
        settings=MappingProxyType({**settings, "cp_comm_type": cp_comm_type}),
        layers_per_stage=layers_per_stage(settings) if settings.get("padded_vocab_size") is not None else (),
        sequence_length=settings["seq_length"],
        num_microbatches=num_microbatches,
        micro_batch_size=settings.get("micro_batch_size") or 1,
        pipeline_parallel_size=settings["pipeline_model_parallel_size"],
        num_chunks=settings.get("virtual_pipeline_model_parallel_size") or 1,
        tensor_parallel_size=settings["tensor_model_parallel_size"],
        segment_multiple=segment_multiple(rows_multiple, settings.get("context_parallel_size") or 1),
    )


def layers_per_stage(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Number of transformer layers on every stage, in the order of depth, as Megatron lays them out."""
    num_ranks = settings.get("pipeline_model_parallel_size", 1)
    num_chunks = settings.get("virtual_pipeline_model_parallel_size") or 1
    layout = settings.get("pipeline_model_parallel_layout")
    if layout is not None:
        return tuple(stage.count("t") for stage in stages_of_layout(layout))
    parts = hybrid_stages(settings)
    if len(parts) > 1:
        return tuple(map(len, parts))
    # The embedding and the loss may count as a layer each.
    embedding = 1 if settings.get("account_for_embedding_in_pipeline_split") else 0
    loss = 1 if settings.get("account_for_loss_in_pipeline_split") else 0
    ranks = _layers_per_rank(settings, settings["num_layers"] + embedding + loss, num_ranks)
    stages = [layers // num_chunks for layers in ranks] * num_chunks
    stages[0] -= embedding
    stages[-1] -= loss
    return tuple(stages)


def _layers_per_rank(settings: Mapping[str, Any], num_layers: int, num_ranks: int) -> list[int]:
    """The layers of each rank: of the first and the last as flags say, of the others equally many."""
    first = settings.get("decoder_first_pipeline_num_layers")
    last = settings.get("decoder_last_pipeline_num_layers")
    fixed: dict[int, int] = {}
    if first is not None:
        fixed[0] = first
    if last is not None:
        fixed[num_ranks - 1] = last
    num_others = max(1, num_ranks - len(fixed))
    layers_of_others = (num_layers - sum(fixed.values())) // num_others
    return [fixed.get(rank, layers_of_others) for rank in range(num_ranks)]


def hybrid_stages(settings: Mapping[str, Any]) -> list[str]:
    """The layer symbols of each stage, or of the whole model if the pattern has no stages."""
    return (settings.get("hybrid_layer_pattern") or "").split("/")[0].split("|")


def is_on_cpu(flags: Namespace) -> bool:
    """Whether `--device` leads to the CPU on this machine."""
    if flags.device != "auto":
        return bool(flags.device == "cpu")
    import torch

    return not torch.cuda.is_available()


def gpu_name(flags: Namespace) -> str:
    """The name of this machine's GPU; an A100 where the run's GPUs are not visible."""
    import torch

    return torch.cuda.get_device_name() if not flags.dry_run and torch.cuda.is_available() else "A100"


def host_memory() -> int:
    """Bytes of the memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory(flags: Namespace) -> float:
    """Bytes that this process can use, in whole GiB so that ranks on equal machines agree."""
    import torch

    if flags.dry_run:
        return float((flags.device_memory or DEVICE_MEMORY) * _GIB)
    if is_on_cpu(flags):
        total = host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, total // _GIB) * _GIB
