"""Hybrid models from Megatron's local layers; Megatron's own specification uses Transformer Engine's. Checkpoints use
the names of the latter, so either kind loads checkpoints of the other, and GPT checkpoints that Megatron translates.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from ..process.megatron_versions import has_latent_attention

_SYMBOLS = "*+-EGM"  # of --hybrid-layer-pattern, for which there are local layers


class LocalHybridStack(HybridStack):
    """Megatron's stack with a final norm of `norm`; raises ValueError for layers that only Transformer Engine has."""

    def __init__(
        self, *args: Any, layer_type_list: list[str], post_layer_norm: bool = True, norm: type, **kwargs: Any
    ) -> None:
        missing = sorted(set(layer_type_list) - set(_SYMBOLS))
        if missing:
            raise ValueError(
                f"--hybrid-layer-pattern has layers {' '.join(missing)}, which need Transformer Engine; use "
                f"{' '.join(_SYMBOLS)}, or --transformer-impl transformer_engine"
            )
        # Megatron's own final norm is Transformer Engine's.
        super().__init__(*args, layer_type_list=layer_type_list, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = norm(self.config, self.config.hidden_size, eps=self.config.layernorm_epsilon)


def local_hybrid_spec(config: TransformerConfig) -> ModuleSpec:
    """The layers of a hybrid model as `hybrid_stack_spec` of Megatron's HybridModel takes them."""

    def submodules(**of_attention: Any) -> TransformerLayerSubmodules:
        return get_gpt_layer_local_submodules(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization, **of_attention
        )

    dense = submodules(qk_l2_norm=config.qk_l2_norm)
    latent = submodules(multi_latent_attention=True)
    experts = submodules(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    norm = dense.input_layernorm
    linear = LocalSpecProvider()
    column = linear.column_parallel_linear()
    row = linear.row_parallel_linear()

    def attention_layer(layer: TransformerLayerSubmodules, **parts: Any) -> ModuleSpec:
        parts |= {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
        return ModuleSpec(module=TransformerLayer, submodules=replace(layer, **parts))

    def mlp_layer(kind: type, layer: TransformerLayerSubmodules, **parts: Any) -> ModuleSpec:
        parts |= {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
        return ModuleSpec(module=kind, submodules=replace(layer, **parts))

    delta_net = attention_layer(
        dense,
        self_attention=ModuleSpec(
            module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=norm, out_proj=row)
        ),
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.in_proj.layer_norm_"},
    )
    mamba = MambaLayerSubmodules(
        norm=norm,
        mixer=ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row)),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    # Around the layers behind a / of the pattern.
    prediction = get_mtp_layer_spec_for_backend(None, linear)
    prediction.submodules = replace(prediction.submodules, enorm=norm, hnorm=norm, layer_norm=norm)
    layers = HybridStackSubmodules(
        attention_layer=attention_layer(dense),
        gdn_layer=delta_net,
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
        mlp_layer=mlp_layer(MLPLayer, dense),
        moe_layer=mlp_layer(MoETransformerLayer, experts, sharded_state_dict_keys_map={}),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[prediction]),
        ),
    )
    if has_latent_attention(layers):
        layers.mla_layer = attention_layer(latent)
    return ModuleSpec(module=LocalHybridStack, params={"norm": norm}, submodules=layers)
