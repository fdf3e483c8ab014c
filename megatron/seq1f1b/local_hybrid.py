"""Hybrid models from Megatron's own layers, where its specification names Transformer Engine's.

The names in checkpoints are those of Transformer Engine's layers, so that either kind continues what the other saved,
and a GPT's weights where Megatron translates them.
"""

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

# The symbols of --hybrid-layer-pattern that there are local layers for.
SYMBOLS = "*+-EGM"
_LINEAR = LocalSpecProvider()


class LocalHybridStack(HybridStack):
    """Megatron's stack with a final norm of `norm`; raises ValueError for layers that only Transformer Engine has."""

    def __init__(
        self, *args: Any, layer_type_list: list[str], post_layer_norm: bool = True, norm: type, **kwargs: Any
    ) -> None:
        missing = sorted(set(layer_type_list) - set(SYMBOLS))
        if missing:
            raise ValueError(
                f"--hybrid-layer-pattern has layers {' '.join(missing)}, which need Transformer Engine; use "
                f"{' '.join(SYMBOLS)}, or --transformer-impl transformer_engine"
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
    return ModuleSpec(
        module=LocalHybridStack,
        params={"norm": norm},
        submodules=HybridStackSubmodules(
            attention_layer=_attention_layer(norm, dense.self_attention, "self_attention.linear_qkv.layer_norm_"),
            mla_layer=_attention_layer(norm, latent.self_attention, None),
            gdn_layer=_attention_layer(norm, _gated_delta_net(norm), "self_attention.in_proj.layer_norm_"),
            mamba_layer=_mamba_layer(norm),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=norm,
                    mlp=dense.mlp,
                    mlp_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
                ),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=norm, mlp=experts.mlp, mlp_bda=get_bias_dropout_add
                ),
            ),
            mtp_block_spec=_prediction_block(norm),
        ),
    )


def _attention_layer(norm: Any, attention: Any, norm_in_checkpoints: str | None) -> ModuleSpec:
    keys = {"input_layernorm.": norm_in_checkpoints} if norm_in_checkpoints else {}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _gated_delta_net(norm: Any) -> ModuleSpec:
    column, row = _LINEAR.column_parallel_linear(), _LINEAR.row_parallel_linear()
    return ModuleSpec(
        module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=norm, out_proj=row)
    )


def _mamba_layer(norm: Any) -> ModuleSpec:
    column, row = _LINEAR.column_parallel_linear(), _LINEAR.row_parallel_linear()
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=norm,
            mixer=ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row)),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _prediction_block(norm: Any) -> ModuleSpec:
    """What multi-token prediction has around the layers behind a / of the pattern."""
    around = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=_LINEAR.column_parallel_linear(), mtp_model_layer=None, layer_norm=norm
    )
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=around)
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    )
