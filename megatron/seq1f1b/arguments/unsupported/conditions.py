"""The conditions under which a feature of Megatron is on, by the settings of a run.

Tested in arguments/test_unsupported.py.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from ..layer_layout import stages_of_layout

Settings = Mapping[str, Any]  # by the names of Megatron's arguments; a missing one is off
type Condition = Callable[[Settings], bool]


def on(name: str) -> Condition:
    """A setting that has a value other than False, 0 and "none"."""

    def holds(settings: Settings) -> bool:
        value = settings.get(name)
        return bool(value) and value != "none"

    return holds


def is_any(name: str, *values: str) -> Condition:
    """A setting with one of these values; of a list, one entry is enough."""
    return lambda settings: not _values_of(settings, name).isdisjoint(values)


def other_than(name: str, *values: str) -> Condition:
    """A setting with a value that is none of these; of a list, one entry is enough."""
    return lambda settings: not _values_of(settings, name) <= {*values}


def above(name: str, limit: int | str) -> Condition:
    """A number above another, or above another setting, which is 1 if it is missing."""

    def holds(settings: Settings) -> bool:
        most = limit if isinstance(limit, int) else settings.get(limit) or 1
        return bool((settings.get(name) or 0) > most)

    return holds


def all_of(*conditions: Condition) -> Condition:
    return lambda settings: all(condition(settings) for condition in conditions)


def without(condition: Condition) -> Condition:
    return lambda settings: not condition(settings)


def always(settings: Settings) -> bool:
    return True


def _values_of(settings: Settings, name: str) -> set[Any]:
    """The values of a setting that may be a list or a member of an enumeration; empty if it is off."""
    value = settings.get(name)
    if not value:
        return set()
    return {*value} if isinstance(value, (list, tuple)) else {getattr(value, "name", value)}


def ends_without_experts(settings: Settings) -> bool:
    """Whether the last layer is a dense one of a mixture of experts."""
    frequency = settings.get("moe_layer_freq") or 1
    if isinstance(frequency, int):
        return ((settings.get("num_layers") or 1) - 1) % frequency > 0
    return not frequency[-1]


def has_experts_of_local_layers(settings: Settings) -> bool:
    """Whether experts are Megatron's local layers."""
    return has_layers_of_experts(settings) and settings.get("transformer_impl") == "local"


def fuses_biases_of_experts(settings: Settings) -> bool:
    """Whether Megatron would add the biases of experts in a fused activation that has no room for them."""
    if settings.get("swiglu"):
        is_fused = settings.get("bias_swiglu_fusion")
    else:
        is_fused = settings.get("bias_gelu_fusion") and not settings.get("quick_geglu")
    return bool(is_fused) and has_layers_of_experts(settings)


def has_layers_of_experts(settings: Settings) -> bool:
    pattern = settings.get("hybrid_layer_pattern")
    return bool(settings.get("num_experts")) and (pattern is None or "E" in pattern)


def finds_a_number_of_segments(settings: Settings) -> bool:
    """Whether sequences are cut into a number of segments that is given, or that follows from what is given."""
    names = ("sequence_splits", "sequence_split_file", "segment_tokens", "unit_tokens")
    return settings.get("sequence_split_strategy") == "terapipe" or any(settings.get(name) for name in names)


def packs_documents(settings: Settings) -> bool:
    """Whether sequences hold several documents that must not see one another."""
    names = ("reset_attention_mask", "sft", "dataloader_inter_document_masking", "keep_documents_apart")
    return any(settings.get(name) for name in names)


def is_on_gpu(settings: Settings) -> bool:
    """Whether the run uses GPUs; gloo serves GPUs, too."""
    return settings.get("distributed_backend") == "nccl" or settings.get("device") == "cuda"


def is_on_gpu_here(settings: Settings) -> bool:
    """Whether this machine, with its packages, has the run's GPUs; False in a rehearsal."""
    return is_on_gpu(settings) and not settings.get("dry_run")


def is_on_hopper_here(settings: Settings) -> bool:
    import torch

    return is_on_gpu_here(settings) and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def installed(*distributions: str) -> tuple[int, ...] | None:
    """Up to three numbers of the version of the first distribution that is installed; None if none is."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return tuple(map(int, re.findall(r"\d+", version(name))[:3]))
    return None


def repeats_no_layers(settings: Settings) -> bool:
    """Whether layers are repeated in groups of none."""
    return settings.get("recompute_method") == "uniform" and settings.get("recompute_num_layers") == 0


def heads_are_unequal(settings: Settings) -> bool:
    heads = (settings.get("num_attention_heads") or 0) // (settings.get("tensor_model_parallel_size") or 1)
    return heads % (settings.get("context_parallel_size") or 1) > 0


def predicts_before_the_loss(settings: Settings) -> bool:
    layout = settings.get("pipeline_model_parallel_layout")
    return layout is not None and any("m" in stage for stage in stages_of_layout(layout)[:-1])


def repeats_embeddings_on_a_rank(settings: Settings) -> bool:
    """Whether several looped chunks of a rank have the embedding, its copy for prediction heads, or the output tied to
    it. Those of a V are refused anyway."""
    layout = settings.get("pipeline_model_parallel_layout")
    if layout is None or settings.get("pipeline_placement") == "v":
        return False
    stages = stages_of_layout(layout)
    if not any("m" in stage for stage in stages):
        return False
    with_weights = {"E", "m"}
    if ties_embeddings(settings):
        with_weights.add("L")
    holding = [number for number, stage in enumerate(stages) if not with_weights.isdisjoint(stage)]
    ranks = {number % settings["pipeline_model_parallel_size"] for number in holding}
    return len(ranks) < len(holding)


def sees_later_tokens(settings: Settings) -> bool:
    """Whether a window reaches beyond the query; its second number may be missing."""
    return tuple(settings["window_size"][1:]) != (0,)


def ties_embeddings(settings: Settings) -> bool:
    return not settings.get("untie_embeddings_and_output_weights", True)


def has_recipe_of_kitchen(settings: Settings) -> bool:
    return settings.get("kitchen_recipe_number") is not None


def has_layers(kind: str) -> Condition:
    """Whether a hybrid model has layers of this letter."""
    return lambda settings: kind in settings["hybrid_layer_pattern"]


def has_recent_transformer_engine(settings: Settings) -> bool:
    return (installed("transformer-engine") or (0,)) >= (2, 20)


def has_old_linear_attention(settings: Settings) -> bool:
    """Whether it runs where Triton miscompiles its backward; later versions refuse to."""
    return (installed("flash-linear-attention", "fla-core") or (9,)) < (0, 5)


def has_faulty_triton(settings: Settings) -> bool:
    return (3, 4) <= (installed("triton") or (0,)) < (3, 7, 1)


def has_mamba_kernels(settings: Settings) -> bool:
    return find_spec("mamba_ssm") is not None and find_spec("causal_conv1d") is not None
