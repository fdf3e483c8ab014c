"""Sizes of a model and the layers of its stages, from Megatron's arguments."""

import pytest

from megatron.seq1f1b.arguments.megatron_run import layers_per_stage
from megatron.seq1f1b.costs.model_shape import (
    DeltaNet,
    Experts,
    LatentAttention,
    Mamba,
    ModelShape,
    model_shape,
)

DENSE = dict(
    num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, kv_channels=8, padded_vocab_size=512
)
MOE = dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=None, moe_shared_expert_intermediate_size=32)
LATENT = dict(q_lora_rank=None, kv_lora_rank=32, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=16)
HYBRID = dict(
    **dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=32),
    **dict(mamba_num_heads=None, mamba_head_dim=16, mamba_num_groups=2, mamba_state_dim=64),
    hybrid_layer_pattern="G-|*M/*",
)
ENDS_COUNT = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)


@pytest.mark.parametrize(
    "settings, sizes",
    [
        (dict(group_query_attention=True, num_query_groups=2, swiglu=True), dict(num_kv_heads=2, is_gated=True)),
        # Megatron leaves the default of --num-query-groups set where grouped queries are off.
        (dict(group_query_attention=False, num_query_groups=1), dict(num_kv_heads=None, is_gated=False)),
        *(
            (dict(**MOE, moe_layer_freq=each), dict(experts=Experts(8, 2, 256, 32), expert_layers=layers))
            for each, layers in ((1, (0, 1, 2, 3)), (2, (0, 2)), ([0, 1, 1, 0], (1, 2)))
        ),
        (dict(multi_latent_attention=True, **LATENT), dict(latent=LatentAttention(0, 32, 8, 4, 16))),
        *(
            (dict(window_size=(128, 0), window_attn_skip_freq=each), dict(window=128, window_layers=layers))
            for each, layers in ((None, (0, 1, 2, 3)), (2, (0, 2)), ([0, 1, 1, 0], (1, 2)))
        ),
        (HYBRID, dict(pattern="G-*M", delta_net=DeltaNet(4, 8, 16, 32), mamba=Mamba(8, 16, 2, 64))),
    ],
    ids=str,
)
def test_sizes_of_a_model(settings, sizes):
    assert model_shape(DENSE) == ModelShape(4, 64, 256, 8, 8, 512)
    shape = model_shape(DENSE | settings)
    assert {name: getattr(shape, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    "ranks, arguments, stages",
    [
        (1, {}, (16,)),
        (4, {}, (4, 4, 4, 4)),
        (2, {"virtual_pipeline_model_parallel_size": 4}, (2,) * 8),
        (4, {"decoder_first_pipeline_num_layers": 1}, (1, 5, 5, 5)),
        (4, {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 1}, (5, 5, 5, 1)),
        (2, {"num_layers": 14, "virtual_pipeline_model_parallel_size": 2, **ENDS_COUNT}, (3, 4, 4, 3)),
        (2, {"pipeline_model_parallel_layout": "Et*7|t*5|t*3|tL"}, (7, 5, 3, 1)),
        (2, HYBRID, (2, 2)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_layers_of_the_stages_in_the_order_of_depth(ranks, arguments, stages):
    assert layers_per_stage({"num_layers": 16, "pipeline_model_parallel_size": ranks, **arguments}) == stages
