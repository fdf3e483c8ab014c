"""How flags are spelled."""

from collections.abc import Mapping
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


def flag_of(name: str) -> str:
    """The flag whose value has this name after parsing: `--num-layers` for `num_layers`."""
    return _SPELLED.get(name, f"--{name.replace('_', '-')}")
