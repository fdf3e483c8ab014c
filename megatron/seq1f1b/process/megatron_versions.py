"""The versions of megatron-core that were tried, and everything that has another name or signature in some of them.

Code asks for the names that a version has, not for its number: on a branch a number stays the same for months.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .patches import owner_of
from .ranks import warn_on_rank_0

if TYPE_CHECKING:
    from torch import Tensor  # takes seconds to import, and commands that plot or plan do without it

# Releases that were seen to train.
TESTED = ("0.19.0", "0.19.1", "0.19.2")
# Versions that were seen to train before their release.
TRIED: Mapping[str, str] = MappingProxyType({"0.20.0": "Megatron-LM's main of 22 August 2026, commit d98e8a64dd"})


def check_version(version: str) -> None:
    """Raise ImportError for a Megatron without the names that we need; warn of an untested one, and say what was tried
    of one that was tried before its release."""
    tested = f"tested with {', '.join(TESTED)}"
    if _numbers(version) < (0, 19):
        raise ImportError(f"megatron.seq1f1b needs megatron-core 0.19 and found {version}; it is {tested}")
    if version in TRIED:
        warn_on_rank_0(
            f"of megatron-core {version} megatron.seq1f1b was tried with {TRIED[version]} only; it is {tested}"
        )
    elif version not in TESTED:
        warn_on_rank_0(f"megatron-core {version} was never tried with megatron.seq1f1b, which is {tested}")


def displaces_padded_buckets(version: str) -> bool:
    """Whether a fully reshardable checkpoint of the optimizer is displaced behind a padded gradient bucket."""
    return _numbers(version) < (0, 20)


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def scan_of_mamba() -> str:
    """The dotted name of the method of `MambaMixer` that runs convolution and scan one after the other."""
    later = "megatron.core.ssm.mamba_mixer.MambaMixer._static_prefill"
    return later if _exists(later) else "megatron.core.ssm.mamba_mixer.MambaMixer._ssm_prefill"


def flash_attention_version(config: Any) -> int | None:
    """--flash-attention-version, by a TransformerConfig that may not have it."""
    return getattr(config, "flash_attention_version", None)


def has_latent_attention(layers: Any) -> bool:
    """Whether a `HybridStackSubmodules` has a layer for `+` of a pattern."""
    return hasattr(layers, "mla_layer")


def checks_for_inference_layers() -> tuple[str, ...]:
    """The dotted names of functions that ask whether a layer is one of inference, by classes of Transformer Engine."""
    name = "megatron.core.transformer.multi_token_prediction.is_inference_column_parallel_linear"
    return (name,) if _exists(name) else ()


def _exists(target: str) -> bool:
    owner, name = owner_of(target)
    return hasattr(owner, name)


class DeltaRuleInputs(NamedTuple):
    """What the kernel of a gated delta net takes, each [b, n, h, ...], and the gate of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor


def delta_rule_inputs(
    layer: Any, qkv: Tensor, gate: Tensor, beta: Tensor, alpha: Tensor, decay_log: Tensor, decay_bias: Tensor
) -> DeltaRuleInputs:
    """The inputs of the kernel of a `GatedDeltaNet`, of the convolved qkv [b, n, d] and the other parts of the
    projection, with its parameters `A_log` and `dt_bias`."""
    batch, length, _ = qkv.shape
    if hasattr(layer, "_compute_gates"):
        inputs = layer._prepare_input_for_gated_delta_rule(qkv, gate, decay_log, decay_bias, batch, length, beta, alpha)
        return DeltaRuleInputs(
            query=inputs["q"],
            key=inputs["k"],
            value=inputs["v"],
            decay=inputs["g"],
            beta=inputs["beta"],
            gate=inputs["gate"],
        )
    query, key, value, gate, beta, alpha = layer._prepare_input_for_gated_delta_rule(
        qkv, gate, batch, length, beta, alpha
    )
    decay, beta = layer._compute_g_and_beta(decay_log, decay_bias, alpha, beta)
    return DeltaRuleInputs(query=query, key=key, value=value, decay=decay, beta=beta, gate=gate)
