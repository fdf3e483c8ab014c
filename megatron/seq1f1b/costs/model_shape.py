"""The sizes of a model that decide what a segment costs.

Tested in commands/test_launch_flags.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

from ..arguments.megatron_run import hybrid_stages
from .cache_keys import hash_once


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a feed-forward block: every token goes through `active` of `total` experts of
    `ffn_hidden_size`, in `active_groups` of `groups` equal groups, and through shared experts, which together have
    `shared_ffn_hidden_size` (0: none)."""

    total: int
    active: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    groups: int = 1
    active_groups: int = 1

    def reached(self, parts: int) -> float:
        """The number of `parts` equal parts of the experts that a token goes to, in the mean over all choices."""
        choices = self.total * self.active_groups // self.groups

        def chance(there: int) -> float:
            """The probability that a token goes to one of `there` of the experts in its groups."""
            return 1 - comb(choices - there, self.active) / comb(choices, self.active)

        if parts >= self.groups:
            # Ranks that share an expert all receive its tokens.
            return parts * self.active_groups / self.groups * chance(max(1, self.total // parts))
        of_part = self.groups // parts
        mean = 0.0
        for chosen in range(min(of_part, self.active_groups) + 1):
            ways = comb(of_part, chosen) * comb(self.groups - of_part, self.active_groups - chosen)
            mean += ways / comb(self.groups, self.active_groups) * chance(chosen * self.total // self.groups)
        return parts * mean


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention. Scores take heads of `head_dim` + `rotary_head_dim`, values of `value_head_dim`."""

    query_rank: int  # 0: queries are projected directly
    kv_rank: int
    head_dim: int
    rotary_head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: queries and keys in `key_heads` of `key_head_dim`, values and states in `value_heads` of
    `value_head_dim`, after a convolution over `convolution` tokens."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    convolution: int = 4

    def shared_by(self, tensor: int, context: int) -> bool:
        return all(heads % (tensor * context) == 0 for heads in (self.key_heads, self.value_heads))


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 layer: `heads` of `head_dim` with a state of `state_dim` columns, after a convolution over
    `convolution` tokens. The heads of a group share the projections of their states."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    convolution: int = 4

    def shared_by(self, tensor: int, context: int) -> bool:
        """Context-parallel ranks share a group or have several."""
        groups, rest = divmod(self.groups, tensor)
        return not rest and self.heads % (tensor * context) == 0 and 0 in (groups % context, context % groups)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the whole model, before it is cut over ranks; layers are numbered from 0."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int  # padded
    num_kv_heads: int | None = None  # None without grouped-query attention
    is_gated: bool = False  # the feed-forward block has three matrices (SwiGLU) instead of two (GELU)
    latent: LatentAttention | None = None
    experts: Experts | None = None
    expert_layers: tuple[int, ...] = ()  # those with `experts`
    window: int | None = None  # in `window_layers`, the keys before its own that a query sees at most
    window_layers: tuple[int, ...] = ()
    # Of a hybrid model, Megatron's symbol of each layer: * attention, + latent attention, - feed-forward, E experts,
    # G gated delta net, M Mamba-2.
    pattern: str | None = None
    delta_net: DeltaNet | None = None
    mamba: Mamba | None = None
    prediction_depth: int = 0  # more layers that predict later tokens, each with a projection to the vocabulary
    has_biases: bool = False  # of products; costs have only those of experts
    learned_positions: int = 0  # with an embedding each; 0: positions are rotary
    has_qk_norms: bool = False  # each head of queries and of keys has a norm
    clamps_activations: bool = False  # what goes into activation functions of experts
    routes_in_32_bit: bool = False  # probabilities of experts

    __hash__ = hash_once

    def blocks(self, layer: int) -> str:
        """The blocks of layer number `layer`, by the symbols of `pattern`."""
        if self.pattern is not None:
            return self.pattern[layer]
        attention = "*" if self.latent is None else "+"
        return attention + ("E" if self.experts is not None and layer in self.expert_layers else "-")

    def window_of(self, layer: int) -> int | None:
        """The keys before its own that a query of this layer sees at most; None: all."""
        return self.window if layer in self.window_layers else None

    def keys_given(self, layer: int, start: int, end: int) -> int:
        """The number of keys that attention of the tokens [start, end) receives in this layer, with their own."""
        window = self.window_of(layer)
        return end if window is None else min(end, end - start + window)


def model_shape(settings: Mapping[str, Any]) -> ModelShape:
    """The sizes of a model from settings by the names of Megatron's arguments."""
    pattern = "".join(hybrid_stages(settings))
    experts = _experts(settings) if settings.get("num_experts") else None
    window, *_ = settings.get("window_size") or (-1,)
    learned_positions = 0
    if settings.get("position_embedding_type") == "learned_absolute":
        learned_positions = settings.get("max_position_embeddings") or 0
    return ModelShape(
        num_layers=settings["num_layers"],
        hidden_size=settings["hidden_size"],
        ffn_hidden_size=settings["ffn_hidden_size"],
        num_heads=settings["num_attention_heads"],
        head_dim=settings["kv_channels"],
        vocab_size=settings["padded_vocab_size"],
        num_kv_heads=settings["num_query_groups"] if settings.get("group_query_attention") else None,
        is_gated=bool(settings.get("swiglu")),
        latent=_latent_attention(settings) if settings.get("multi_latent_attention") else None,
        experts=experts,
        expert_layers=() if experts is None else _expert_layers(settings),
        window=window if window >= 0 else None,  # -1: all tokens before
        window_layers=_window_layers(settings) if window >= 0 else (),
        pattern=pattern or None,
        delta_net=_delta_net(settings) if "G" in pattern else None,
        mamba=_mamba(settings) if "M" in pattern else None,
        prediction_depth=settings.get("mtp_num_layers") or 0,
        has_biases=bool(settings.get("add_bias_linear")),
        learned_positions=learned_positions,
        has_qk_norms=bool(settings.get("qk_layernorm")),
        clamps_activations=settings.get("activation_func_clamp_value") is not None,
        routes_in_32_bit=settings.get("moe_router_dtype") in ("fp32", "fp64"),
    )


def _latent_attention(settings: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        query_rank=settings["q_lora_rank"] or 0,
        kv_rank=settings["kv_lora_rank"],
        head_dim=settings["qk_head_dim"],
        rotary_head_dim=settings["qk_pos_emb_head_dim"],
        value_head_dim=settings["v_head_dim"],
    )


def _experts(settings: Mapping[str, Any]) -> Experts:
    return Experts(
        total=settings["num_experts"],
        active=settings["moe_router_topk"],
        ffn_hidden_size=settings["moe_ffn_hidden_size"] or settings["ffn_hidden_size"],
        shared_ffn_hidden_size=settings["moe_shared_expert_intermediate_size"] or 0,
        groups=settings.get("moe_router_num_groups") or 1,
        active_groups=settings.get("moe_router_group_topk") or 1,
    )


def _expert_layers(settings: Mapping[str, Any]) -> tuple[int, ...]:
    frequency = settings["moe_layer_freq"]
    return _chosen(settings, frequency, lambda layer: layer % frequency == 0)


def _window_layers(settings: Mapping[str, Any]) -> tuple[int, ...]:
    skipped = settings.get("window_attn_skip_freq")
    return _chosen(settings, skipped, lambda layer: skipped is None or (layer + 1) % skipped != 0)


def _delta_net(settings: Mapping[str, Any]) -> DeltaNet:
    return DeltaNet(
        key_heads=settings["linear_num_key_heads"],
        value_heads=settings["linear_num_value_heads"],
        key_head_dim=settings["linear_key_head_dim"],
        value_head_dim=settings["linear_value_head_dim"],
        convolution=settings.get("linear_conv_kernel_dim") or 4,
    )


def mamba_heads(settings: Mapping[str, Any]) -> int:
    """The heads of a Mamba layer: without their number those of twice the hidden size, by which Megatron expands."""
    heads: int = settings["mamba_num_heads"] or 2 * settings["hidden_size"] // settings["mamba_head_dim"]
    return heads


def _mamba(settings: Mapping[str, Any]) -> Mamba:
    return Mamba(
        heads=mamba_heads(settings),
        head_dim=settings["mamba_head_dim"],
        groups=settings["mamba_num_groups"],
        state_dim=settings["mamba_state_dim"],
    )


def _chosen(settings: Mapping[str, Any], flags: Any, usual: Callable[[int], bool]) -> tuple[int, ...]:
    """The layers of a list of 0 and 1, or those of `usual` without a list."""
    chooses = flags.__getitem__ if isinstance(flags, list) else usual
    return tuple(layer for layer in range(settings["num_layers"]) if chooses(layer))
