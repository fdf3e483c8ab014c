"""How flags are spelled, and which values follow them."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

# Megatron's flags that have another name than their values.
_SPELLED: Mapping[str, str] = MappingProxyType(
    {
        "fp4": "--fp4-format",
        "fp8": "--fp8-format",
        "layernorm_epsilon": "--norm-epsilon",
        "metadata_path": "--tokenizer-metadata",
        "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
        "special_tokens": "--tokenizer-special-tokens",
    }
)

# Fields of a TransformerConfig, or of DistributedDataParallel's configuration, and the names of their arguments.
ARGUMENTS_OF_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "num_moe_experts": "num_experts",
        "gated_linear_unit": "swiglu",
        "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
        "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
        "param_name_patterns_for_fp32_local_accumulation": "ddp_param_name_patterns_for_fp32_local_accumulation",
    }
)


def flag_of(name: str) -> str:
    """The flag whose value has this name after parsing: `--num-layers` for `num_layers`."""
    return _SPELLED.get(name, f"--{name.replace('_', '-')}")


def values_by_flag(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each value among the words of a command line, with the flag before it; that is empty for the words before the
    first flag."""
    flag = ""
    for word in words:
        if not word.startswith("--"):
            yield flag, word
            continue
        flag, is_joined, value = word.partition("=")
        if is_joined:
            yield flag, value
