"""The sizes of a model, from settings by the names of Megatron's arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..arguments.megatron_run import hybrid_stages
from .costs.model_shape import DeltaNet, Experts, LatentAttention, Mamba, ModelShape
from .costs.training_setup import ALL_BUT_ATTENTION


def model_shape(settings: Mapping[str, Any]) -> ModelShape:
    """The sizes that decide what a segment costs."""
    sizes: dict[str, Any] = {}
    if settings.get("multi_latent_attention"):
        names = "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"
        sizes["latent"] = LatentAttention(settings["q_lora_rank"] or 0, *(settings[name] for name in names))
    if settings.get("num_experts"):
        each = settings["moe_layer_freq"]
        sizes["expert_layers"] = _chosen(settings, each, lambda layer: layer % each == 0)
        sizes["experts"] = Experts(
            settings["num_experts"],
            settings["moe_router_topk"],
            settings["moe_ffn_hidden_size"] or settings["ffn_hidden_size"],
            settings["moe_shared_expert_intermediate_size"] or 0,
        )
    window, skipped = settings.get("window_size"), settings.get("window_attn_skip_freq")
    if window and window[0] >= 0:
        sizes["window"] = window[0]
        sizes["window_layers"] = _chosen(settings, skipped, lambda layer: skipped is None or (layer + 1) % skipped != 0)
    if settings.get("position_embedding_type") == "learned_absolute":
        sizes["learned_positions"] = settings.get("max_position_embeddings") or 0
    if pattern := "".join(hybrid_stages(settings)):
        sizes |= _hybrid(pattern, settings)
    return ModelShape(
        num_layers=settings["num_layers"],
        hidden_size=settings["hidden_size"],
        ffn_hidden_size=settings["ffn_hidden_size"],
        num_heads=settings["num_attention_heads"],
        head_dim=settings["kv_channels"],
        vocab_size=settings["padded_vocab_size"],
        num_kv_heads=settings["num_query_groups"] if settings.get("group_query_attention") else None,
        is_gated=bool(settings.get("swiglu")),
        prediction_depth=settings.get("mtp_num_layers") or 0,
        has_biases=bool(settings.get("add_bias_linear")),
        has_qk_norms=bool(settings.get("qk_layernorm")),
        **sizes,
    )


def _chosen(settings: Mapping[str, Any], flags: Any, usual: Callable[[int], bool]) -> tuple[int, ...]:
    """The layers of a list of 0 and 1, or those of `usual` where there is none."""
    chooses = flags.__getitem__ if isinstance(flags, list) else usual
    return tuple(layer for layer in range(settings["num_layers"]) if chooses(layer))


def _hybrid(pattern: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"pattern": pattern}
    if "G" in pattern:
        found["delta_net"] = DeltaNet(
            settings["linear_num_key_heads"],
            settings["linear_num_value_heads"],
            settings["linear_key_head_dim"],
            settings["linear_value_head_dim"],
            settings.get("linear_conv_kernel_dim") or 4,
        )
    if "M" in pattern:
        head = settings["mamba_head_dim"]
        heads = settings["mamba_num_heads"] or 2 * settings["hidden_size"] // head  # Megatron expands by 2
        found["mamba"] = Mamba(heads, head, settings["mamba_num_groups"], settings["mamba_state_dim"])
    return found


def recompute_of(settings: Mapping[str, Any], keeps_attention: bool) -> str:
    """The `recompute` of a TrainingSetup, or other names of Megatron's modules, which have no costs."""
    granularity = settings.get("recompute_granularity")
    if granularity == "selective":
        return " ".join(sorted(settings.get("recompute_modules") or ["core_attn"]))
    return ALL_BUT_ATTENTION if keeps_attention else granularity or "none"


def recomputed_share(settings: Mapping[str, Any], layers_per_stage: Sequence[int]) -> float:
    """The share of the layers of a stage that full recomputation repeats."""
    if settings.get("recompute_granularity") != "full" or settings.get("recompute_method") != "block":
        return 1.0
    return min(1.0, (settings.get("recompute_num_layers") or 1) / max(layers_per_stage))


def ranks_of_experts(settings: Mapping[str, Any]) -> int:
    """The number of ranks that share the experts. Ranks that cut an expert, by default the tensor-parallel ones, count
    as if each had some of the experts."""
    if not settings.get("num_experts"):
        return 1
    tensor = settings.get("expert_tensor_parallel_size") or settings.get("tensor_model_parallel_size") or 1
    return tensor * (settings.get("expert_model_parallel_size") or 1)
