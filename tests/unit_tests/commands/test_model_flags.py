"""The flags of a preset make the public model, by what Megatron reads from them."""

import sys
import warnings
from functools import cache
from inspect import signature
from unittest.mock import patch

import pytest
import torch
import transformers

from megatron.seq1f1b.commands.model_flags import PRESETS, preset_words

LLAMA = {
    **{"rms_norm_eps": 1e-5, "rope_theta": 500_000, "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128},
    **{"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192},
    **{"attention_bias": False, "is_gated": True, "tie_word_embeddings": False},
}
MIXTRAL = {
    **{"rms_norm_eps": 1e-5, "rope_theta": 1_000_000, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 8},
    **{"num_experts_per_tok": 2, "attention_bias": False, "is_gated": True, "tie_word_embeddings": False},
}
QWEN = {
    **{"rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128},
    **{"num_experts_per_tok": 8, "qk_norm": True, "attention_bias": False, "vocab_size": 151936, "is_gated": True},
    **{"tie_word_embeddings": False},
}


def sizes(layers: int, hidden: int, heads: int, **others: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **others}


# From config.json of each model, by its names; what is_gated, qk_norm, has_sinks and the like say is in its code.
PUBLISHED = {
    "llama3-8b": LLAMA | sizes(32, 4096, 32, intermediate_size=14336),
    "llama3-70b": LLAMA | sizes(80, 8192, 64, intermediate_size=28672),
    "llama3-405b": LLAMA | sizes(126, 16384, 128, intermediate_size=53248),
    "mixtral-8x7b": MIXTRAL | sizes(32, 4096, 32, intermediate_size=14336),
    "mixtral-8x22b": MIXTRAL | sizes(56, 6144, 48, intermediate_size=16384),
    "qwen3-30b-a3b": QWEN | sizes(48, 2048, 32, intermediate_size=6144, moe_intermediate_size=768),
    "qwen3-235b-a22b": QWEN | sizes(94, 4096, 64, intermediate_size=12288, moe_intermediate_size=1536),
    "deepseek-v3": {
        **sizes(61, 7168, 128, intermediate_size=18432, moe_intermediate_size=2048),
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "vocab_size": 129280},
        **{"rms_norm_eps": 1e-6, "rope_theta": 10_000, "factor": 40, "mscale": 1, "mscale_all_dim": 1, "qk_norm": True},
        **{"num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        **{"scoring_func": "sigmoid", "has_expert_bias": True, "is_gated": True, "tie_word_embeddings": False},
    },
    "qwen3-next-80b": {
        **sizes(48, 2048, 16, intermediate_size=5120, moe_intermediate_size=512),
        **{"num_key_value_heads": 2, "vocab_size": 151936, "linear_conv_kernel_dim": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
        **{"rms_norm_eps": 1e-6, "rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "head_dim": 256},
        **{"num_experts": 512, "num_experts_per_tok": 10, "qk_norm": True, "has_output_gate": True, "is_gated": True},
        **{"norms_around_one": True, "gates_shared_expert": True, "shared_expert_intermediate_size": 512},
        **{"attention_bias": False, "tie_word_embeddings": False},
    },
    "gpt-oss-120b": {
        **sizes(36, 2880, 64, intermediate_size=2880),
        **{"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128},
        **{"layer_types": ["sliding_attention", "full_attention"] * 18, "has_sinks": True},
        **{"rms_norm_eps": 1e-5, "rope_theta": 150_000, "factor": 32, "beta_fast": 32, "beta_slow": 1},
        **{"truncate": False, "original_max_position_embeddings": 4096, "attention_bias": True, "swiglu_limit": 7},
        **{"num_experts": 128, "num_experts_per_tok": 4, "is_gated": True, "tie_word_embeddings": False},
    },
}


def layer_types(args) -> list[str]:
    """The attention of each layer, by Megatron's own functions."""
    from megatron.core.transformer.utils import is_layer_window_attention

    if args.hybrid_layer_pattern:
        names = {"G": "linear_attention", "*": "full_attention"}
        return [names[symbol] for symbol in args.hybrid_layer_pattern if symbol in names]
    has_window = (
        is_layer_window_attention(args.window_size, args.window_attn_skip_freq, number + 1)
        for number in range(args.num_layers)
    )
    return ["sliding_attention" if window else "full_attention" for window in has_window]


@cache
def read_by_megatron(name: str) -> dict:
    """What Megatron makes of the flags, by the names of Hugging Face."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args

    with patch.object(sys, "argv", ["pretrain_gpt.py", *preset_words(name, 4096), "--micro-batch-size", "1"]):
        args = parse_args()
    args.params_dtype, args.apply_rope_fusion = torch.bfloat16, False
    args.num_layers = args.num_layers or len(args.hybrid_layer_pattern)
    with warnings.catch_warnings(action="ignore"):
        config = core_transformer_config_from_args(args)
    assert config.normalization == "RMSNorm"
    scaling = args.rope_scaling_factor if args.use_rope_scaling else args.rotary_scaling_factor
    # The rest of Llama's scaling is constants of Megatron.
    of_scaling = signature(RotaryEmbedding._apply_scaling).parameters if args.use_rope_scaling else {}
    dense = args.moe_layer_freq.count(0) if isinstance(args.moe_layer_freq, list) else 0
    types = layer_types(args)
    return {
        "layer_types": types,
        "low_freq_factor": of_scaling and of_scaling["low_freq_factor"].default,
        "high_freq_factor": of_scaling and of_scaling["high_freq_factor"].default,
        "first_k_dense_replace": dense,
        "num_nextn_predict_layers": args.mtp_num_layers,
        "has_sinks": config.softmax_type == "learnable",
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "rms_norm_eps": config.layernorm_epsilon,
        "norms_around_one": config.layernorm_zero_centered_gamma,
        "qk_norm": config.qk_layernorm,
        "rope_theta": args.rotary_base,
        "factor": scaling,
        "mscale": args.mscale,
        "mscale_all_dim": args.mscale_all_dim,
        "partial_rotary_factor": args.rotary_percent,
        "beta_fast": args.yarn_beta_fast,
        "beta_slow": args.yarn_beta_slow,
        "truncate": args.yarn_correction_range_round_to_int,
        "original_max_position_embeddings": (
            of_scaling["original_max_position_embeddings"].default
            if of_scaling
            else args.yarn_original_max_position_embeddings
        ),
        "num_hidden_layers": len(types),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "gates_shared_expert": config.moe_shared_expert_gate,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "has_output_gate": config.attention_output_gate,
        "attention_bias": config.add_bias_linear,
        "is_gated": config.gated_linear_unit,
        "swiglu_limit": config.activation_func_clamp_value,
        "num_experts": config.num_moe_experts,
        "num_local_experts": config.num_moe_experts,
        "n_routed_experts": config.num_moe_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "n_group": config.moe_router_num_groups,
        "topk_group": config.moe_router_group_topk,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
        "scoring_func": config.moe_router_score_function,
        "has_expert_bias": config.moe_router_enable_expert_bias,
        "kv_lora_rank": getattr(config, "kv_lora_rank", None),
        "q_lora_rank": getattr(config, "q_lora_rank", None),
        "qk_rope_head_dim": getattr(config, "qk_pos_emb_head_dim", None),
        "qk_nope_head_dim": getattr(config, "qk_head_dim", None),
        "v_head_dim": getattr(config, "v_head_dim", None),
        "sliding_window": config.window_size and config.window_size[0],
        "vocab_size": args.vocab_size,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_public_model(name):
    found = read_by_megatron(name)
    assert {key: found[key] for key in PUBLISHED[name]} == PUBLISHED[name]


# Configurations of Hugging Face whose defaults are one of the models; names that mean something else there.
CLASSES = {
    "mixtral-8x7b": ("MixtralConfig", {"head_dim"}),
    "deepseek-v3": ("DeepseekV3Config", {"head_dim", "num_key_value_heads"}),
    "gpt-oss-120b": ("GptOssConfig", {"swiglu_limit"}),
    "qwen3-next-80b": ("Qwen3NextConfig", {"intermediate_size"}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_preset_has_the_sizes_that_transformers_has(name):
    kind, others = CLASSES[name]
    theirs, found = getattr(transformers, kind)().to_dict(), read_by_megatron(name)
    compared = {key: value for key, value in theirs.items() if key in found and key not in others and value is not None}
    assert len(compared) >= 10 and {key: found[key] for key in compared} == compared


def test_every_model_of_others_is_compared():
    """The other presets are those of papers, with GPT's layers."""
    assert {name for name, words in PRESETS.items() if "RMSNorm" in words} == {*PUBLISHED}
