"""The table of what is supported: every row is shown by a test, every refusal is a sentence."""

import argparse
from importlib.metadata import PackageNotFoundError

import pytest

from megatron.seq1f1b import validate
from megatron.seq1f1b.arguments import packages, run_of_arguments
from megatron.seq1f1b.arguments.supported import UNSUPPORTED, Use, first_unsupported
from unit_tests.arguments.parsed import parsed

# What turns each unsupported feature on, by the row's feature, where the setting is not `name=True` of a flag `--name`.
SETTINGS = {
    "--te-precision-config-file or a recipe of kitchen (quant_recipe)": {"kitchen_recipe_number": 0},
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "--context-parallel-size above 1 with another --cp-comm-type than a2a and all_gather": {
        "context_parallel_size": 2,
        "cp_comm_type": ["p2p"],
    },
    "--cp-comm-type a2a with attention heads of a tensor-parallel rank that --context-parallel-size does not divide": {
        "context_parallel_size": 64,
        "cp_comm_type": ["a2a"],
    },
    "--moe-expert-capacity-factor": {"moe_expert_capacity_factor": 1.0},
    "--tensor-parallel-num-weight-shards or --expert-tensor-parallel-num-weight-shards above a group's size": {
        "expert_tensor_parallel_num_weight_shards": 2
    },
    "--moe-router-load-balancing-type sinkhorn, quantile_balancing": {"moe_router_load_balancing_type": ["sinkhorn"]},
    "--pipeline-model-parallel-layout with multi-token prediction before the loss": {
        "mtp_num_layers": 1,
        "pipeline_model_parallel_layout": "Et|t|m|L",
        "virtual_pipeline_model_parallel_size": 2,
        "padded_vocab_size": None,
    },
    "--ckpt-format torch": {"ckpt_format": "torch", "virtual_pipeline_model_parallel_size": 2},
    "--experimental-attention-variant": {"experimental_attention_variant": "dsa"},
    "--hybrid-layer-pattern with D (sparse attention)": {"hybrid_layer_pattern": "*D"},
    "--recompute-modules mlp with biases": {
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp"],
        "add_bias_linear": True,
    },
    "--recompute-modules gdn_norm_out": {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]},
    "--heterogeneous-layers-config-path": {"heterogeneous_layers_config_path": "layers.json"},
    "--window-size with tokens after the query": {"window_size": (128, 1)},
    "--position-embedding-type mrope": {"position_embedding_type": "mrope"},
    "--allow-ambiguous-pad-tokens with --reset-attention-mask": {
        "allow_ambiguous_pad_tokens": True,
        "reset_attention_mask": True,
    },
    "--fp8-recipe delayed, tensorwise, custom": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "--fp8-format with --context-parallel-size above 1 or --num-experts": {
        "fp8": "hybrid",
        "fp8_recipe": "mxfp8",
        "context_parallel_size": 2,
        "cp_comm_type": ["a2a"],
    },
    "fp8_dot_product_attention or fp8_multi_head_attention": {"fp8_multi_head_attention": True},
    "--fp4-format": {"fp4": "e2m1"},
    "--attention-backend fused with --attention-dropout and a window or packed documents": {
        "attention_backend": argparse.Namespace(name="fused"),
        "distributed_backend": "nccl",
        "attention_dropout": 0.1,
        "window_size": (128, 0),
    },
    "--attention-backend fused without Transformer Engine 2.20 or later": {
        "attention_backend": argparse.Namespace(name="fused"),
        "distributed_backend": "nccl",
    },
    "--moe-flex-dispatcher-backend hybridep with packed documents": {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        "reset_attention_mask": True,
    },
    "--hybrid-layer-pattern with G, flash-linear-attention before 0.5 and Triton 3.4.0 to 3.7.0": {
        "hybrid_layer_pattern": "G-*-",
        "distributed_backend": "nccl",
        "padded_vocab_size": None,
    },
    "--hybrid-layer-pattern with M on a GPU without mamba-ssm and causal-conv1d": {
        "hybrid_layer_pattern": "M-*-",
        "distributed_backend": "nccl",
        "padded_vocab_size": None,
    },
    "--moe-grouped-gemm with biases and --transformer-impl transformer_engine": {
        "transformer_impl": "transformer_engine",
        "moe_grouped_gemm": True,
        "add_bias_linear": True,
    },
    "--cpu-offloading-num-layers": {"cpu_offloading_num_layers": 2},
    "a run without --use-distributed-optimizer": {"use_distributed_optimizer": False},
    "--num-distributed-optimizer-instances above 1": {"num_distributed_optimizer_instances": 2},
    "--optimizer other than adam and sgd": {"optimizer": "muon"},
    "--ckpt-format other than torch_dist": {"ckpt_format": "zarr"},
    "a run whose documents see one another": {"reset_attention_mask": False},
    "a run without --calculate-per-token-loss": {"calculate_per_token_loss": False},
    "--micro-batch-size or --eval-micro-batch-size above 1": {"eval_micro_batch_size": 2},
    "--moe-token-dispatcher-type allgather with expert parallelism": {
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": 2,
    },
    "--moe-router-load-balancing-type global_aux_loss": {"moe_router_load_balancing_type": ["global_aux_loss"]},
    "--overlap-grad-reduce without --no-gradient-accumulation-fusion": {
        "overlap_grad_reduce": True,
        "gradient_accumulation_fusion": True,
    },
}
FLAGS = {
    Use.ANY_SCHEDULE: ("--pipeline-schedule", "1f1b"),
    Use.SEGMENTS: ("--sequence-splits", "4", "--device", "cuda"),
    Use.SPLIT_BACKWARDS: ("--pipeline-schedule", "zb-h1"),
    Use.V_CHUNKS: ("--pipeline-schedule", "1f1b", "--pipeline-placement", "v"),
    Use.OFFLOAD: ("--pipeline-schedule", "1f1b", "--offload-activations", "1"),
    Use.PARTITIONED_STATE: ("--pipeline-schedule", "1f1b", "--partition-state"),
    Use.UNITS: ("--unit-tokens", "16"),
}
IN_UNITS = {"calculate_per_token_loss": True, "reset_attention_mask": True, "micro_batch_size": 1}
ROWS = [(use, row) for use, rows in UNSUPPORTED.items() for row in rows]


def settings_of(row):
    name = row.feature.removeprefix("--").replace("-", "_")
    return {"use_distributed_optimizer": True} | SETTINGS.get(row.feature, {name: True})


@pytest.mark.parametrize("use, row", ROWS, ids=[row.feature for _, row in ROWS])  # as `shown_by` has them
def test_an_unsupported_feature_is_one_sentence(monkeypatch, use, row):
    if "on a GPU without" in row.feature or "flash-linear-attention" in row.feature:
        versions = {"flash-linear-attention": (0, 4, 2), "triton": (3, 6, 0)}
        monkeypatch.setattr(packages, "find_spec", lambda module: None)
        monkeypatch.setattr(packages, "_version", versions.get)
        monkeypatch.setattr(packages, "_is_hopper", lambda: True)
    args = parsed(*FLAGS[use], **(IN_UNITS if use is Use.UNITS else {}) | settings_of(row))
    with pytest.raises(ValueError) as error:
        validate(args)
    assert str(error.value) == f"{row.feature} {row.because}; {row.way_out}"
    # By itself, too: another row does not stand in for it, nor does any use but its own; units need several flags.
    settings = run_of_arguments(parsed(**settings_of(row))).settings
    assert first_unsupported(settings, {*Use} - {use, Use.UNITS}) is None
    validate(parsed(**settings_of(row)))


@pytest.mark.parametrize("installed, is_enough", [("2.19.1", False), ("2.20.0", True), ("2.21.0+cu13", True)])
def test_fused_attention_needs_a_transformer_engine_of_today(monkeypatch, installed, is_enough):
    monkeypatch.setattr(packages, "version", lambda package: installed)
    settings = SETTINGS["--attention-backend fused without Transformer Engine 2.20 or later"]
    found = first_unsupported(run_of_arguments(parsed(**settings)).settings, {Use.SEGMENTS})
    assert (found is None) == is_enough


ON_GPU = {"distributed_backend": "nccl"}


@pytest.mark.parametrize(
    "fla, triton, is_hopper, are_wrong",
    [
        ("0.4.2", "3.3.1", True, False),
        ("0.4.2", "3.4.0", True, True),
        ("0.4.2", "3.7.0", True, True),
        ("0.4.2", "3.7.1+git1", True, False),
        ("0.4.2", "3.6.0", False, False),
        ("0.5.0.dev1", "3.6.0", True, False),
        (None, "3.6.0", True, False),
    ],
)
def test_gated_delta_nets_are_wrong_by_version(monkeypatch, fla, triton, is_hopper, are_wrong):
    """Later ones refuse to run there, and Megatron names one that is missing."""

    def version(name):
        found = {"fla-core": fla, "triton": triton}.get(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(packages, "version", version)
    monkeypatch.setattr(packages, "_is_hopper", lambda: is_hopper)
    assert packages.delta_nets_are_wrong(ON_GPU) == are_wrong
    assert not packages.delta_nets_are_wrong(ON_GPU | {"dry_run": True})


@pytest.mark.parametrize(
    "given, is_refused",
    [
        ({"attention_dropout": 0.1}, False),
        ({"reset_attention_mask": True}, False),
        ({"attention_dropout": 0.1, "reset_attention_mask": True}, True),
        ({"attention_dropout": 0.1, "window_size": (128, 0)}, True),
        ({"attention_dropout": 0.1, "window_size": (128, 0), "distributed_backend": "gloo"}, False),
    ],
)
def test_fused_attention_has_no_dropout_in_documents_or_windows(given, is_refused):
    settings = ON_GPU | {"attention_backend": argparse.Namespace(name="fused")} | given
    assert packages.fused_attention_has_no_backend(settings) == is_refused
