"""Sizes of a model and the layers of its stages, from Megatron's arguments."""

import pytest

from megatron.seq1f1b.arguments.megatron_run import layers_per_stage
from megatron.seq1f1b.planning.costs import DeltaNet, Experts, LatentAttention, Mamba, ModelShape
from megatron.seq1f1b.planning.model_sizes import model_shape

DENSE = dict(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=8,
    kv_channels=8,
    padded_vocab_size=512,
)


def test_a_plain_gpt():
    assert model_shape(DENSE) == ModelShape(4, 64, 256, 8, 8, 512)


def test_grouped_queries_and_swiglu():
    shape = model_shape(dict(**DENSE, group_query_attention=True, num_query_groups=2, swiglu=True))
    assert (shape.num_kv_heads, shape.is_gated) == (2, True)
    # Megatron leaves the default of --num-query-groups set where grouped queries are off.
    assert model_shape(dict(**DENSE, group_query_attention=False, num_query_groups=1)).num_kv_heads is None


@pytest.mark.parametrize("frequency, layers", [(1, (0, 1, 2, 3)), (2, (0, 2)), ([0, 1, 1, 0], (1, 2))])
def test_experts(frequency, layers):
    moe = dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=None, moe_shared_expert_intermediate_size=32)
    shape = model_shape(dict(**DENSE, **moe, moe_layer_freq=frequency))
    assert (shape.experts, shape.expert_layers) == (Experts(8, 2, 256, 32), layers)


def test_latent_attention():
    latent = dict(q_lora_rank=None, kv_lora_rank=32, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=16)
    shape = model_shape(dict(**DENSE, multi_latent_attention=True, **latent))
    assert shape.latent == LatentAttention(0, 32, 8, 4, 16)


@pytest.mark.parametrize(
    "arguments, stages",
    [
        ({}, (16,)),
        ({"pipeline_model_parallel_size": 4}, (4, 4, 4, 4)),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4}, (2,) * 8),
        ({"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 1}, (1, 5, 5, 5)),
        (
            {
                "pipeline_model_parallel_size": 4,
                "decoder_first_pipeline_num_layers": 5,
                "decoder_last_pipeline_num_layers": 1,
            },
            (5, 5, 5, 1),
        ),
        (
            {
                "num_layers": 14,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            (3, 4, 4, 3),
        ),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*7|t*5|t*3|tL"}, (7, 5, 3, 1)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_layers_of_the_stages_in_the_order_of_depth(arguments, stages):
    assert layers_per_stage(dict(**{"num_layers": 16, **arguments})) == stages


@pytest.mark.parametrize("frequency, layers", [(None, (0, 1, 2, 3)), (2, (0, 2)), ([0, 1, 1, 0], (1, 2))])
def test_sliding_windows(frequency, layers):
    shape = model_shape(DENSE | {"window_size": (128, 0), "window_attn_skip_freq": frequency})
    assert (shape.window, shape.window_layers) == (128, layers)


def test_hybrid_layers():
    sizes = {
        **dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=32),
        **dict(mamba_num_heads=None, mamba_head_dim=16, mamba_num_groups=2, mamba_state_dim=64),
    }
    settings = DENSE | sizes | {"hybrid_layer_pattern": "G-|*M/*", "pipeline_model_parallel_size": 2}
    shape = model_shape(settings)
    assert (shape.pattern, shape.delta_net, shape.mamba) == ("G-*M", DeltaNet(4, 8, 16, 32), Mamba(8, 16, 2, 64))
    assert layers_per_stage(settings) == (2, 2)
