"""The table of what is unsupported: every row ends a launch with its sentence, and no other does in its place."""

import argparse
import re
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training.arguments import add_megatron_arguments

from megatron.seq1f1b import add_arguments, validate
from megatron.seq1f1b.arguments import run_of_arguments
from megatron.seq1f1b.arguments.unsupported import UNSUPPORTED, OurFeature, conditions, first_unsupported, setting_of
from unit_tests.arguments.parsed import parsed

ON_GPU = {"distributed_backend": "nccl"}
# What turns on the clauses of the table that are no flags; the flags of `SETTINGS` need more than a value.
CLAUSES = {
    "a run": {},
    "biases": {"add_bias_linear": True},
    "fused activations": {"bias_gelu_fusion": True, "transformer_impl": "transformer_engine"},
    "fused gradient accumulation": {"gradient_accumulation_fusion": True},
    "packed documents": {"reset_attention_mask": True},
    "unequal numbers of attention heads": {"context_parallel_size": 64},
    "tokens after the query": {"window_size": (128, 1)},
    "multi-token prediction before the loss": {
        "mtp_num_layers": 1,
        "pipeline_model_parallel_layout": "Et|m|t|L",
        "untie_embeddings_and_output_weights": True,
    },
    "copies of the embedding in several chunks of a rank": {
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "Et|tt|tm|L",
    },
    "tied embeddings": {"untie_embeddings_and_output_weights": False},
    "a dense last layer": {"moe_layer_freq": [1, 0]},
    "E": {"hybrid_layer_pattern": "*E", "padded_vocab_size": None},
    "a recipe of kitchen": {"kitchen_recipe_number": 0},
    "D (sparse attention)": {"hybrid_layer_pattern": "*D"},
    "G": {"hybrid_layer_pattern": "G-*-", "padded_vocab_size": None},
    "M": {"hybrid_layer_pattern": "M-*-", "padded_vocab_size": None},
    "a GPU": ON_GPU,
    "the CPU": {"distributed_backend": "gloo"},
    "this GPU": ON_GPU,
    "this Hopper GPU": ON_GPU,
    "Transformer Engine 2.20 or later": {},
    "flash-linear-attention before 0.5": {},
    "Triton 3.4.0 to 3.7.0": {},
    "mamba-ssm, causal-conv1d": {},
}
SETTINGS = {
    "--moe-router-topk above --num-experts": {"num_experts": 4, "moe_router_topk": 9},
    "--recompute-num-layers 0": {"recompute_num_layers": 0},
    "--num-experts": {"num_experts": 4},
    "--timing-log-level 2": {"timing_log_level": 2},
    "--pipeline-model-parallel-size above 1": {"pipeline_model_parallel_size": 2},
    "--window-size": {"window_size": (128, 0)},
    "--attention-dropout": {"attention_dropout": 0.1},
    "--attention-backend fused": {"attention_backend": argparse.Namespace(name="fused")},
    "--pipeline-model-parallel-layout": {"virtual_pipeline_model_parallel_size": 2, "padded_vocab_size": None},
    "--eval-micro-batch-size above 1": {
        "eval_micro_batch_size": 2,
        "micro_batch_size": 1,
        "multiple_validation_sets": True,
    },
    "--ckpt-format torch": {"ckpt_format": "torch", "virtual_pipeline_model_parallel_size": 2},
    "--fp8-format": {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
    "--context-parallel-size above 1": {"context_parallel_size": 2, "cp_comm_type": ["a2a"]},
    "--expert-model-parallel-size above 1": {"expert_model_parallel_size": 2},
    "--hybrid-layer-pattern": {},
}
FLAGS = {
    OurFeature.EVERY_RUN: (),
    OurFeature.MEGATRONS_OWN: (),
    OurFeature.ANY_SCHEDULE: ("--pipeline-schedule", "1f1b"),
    OurFeature.SEGMENTS: ("--sequence-splits", "4", "--device", "cuda"),
    OurFeature.SPLIT_BACKWARDS: ("--pipeline-schedule", "zb-h1"),
    OurFeature.V_CHUNKS: ("--pipeline-schedule", "1f1b", "--pipeline-placement", "v"),
    OurFeature.OFFLOAD: ("--pipeline-schedule", "1f1b", "--offload-activations", "1"),
    OurFeature.PARTITIONED_STATE: ("--pipeline-schedule", "1f1b", "--partition-state"),
    OurFeature.PAIRS: ("--pipeline-schedule", "1f1b"),
    OurFeature.SEGMENTS_OF_TOKENS: ("--segment-tokens", "16"),
    OurFeature.UNITS: ("--unit-tokens", "16"),
}
IN_PAIRS = {
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
}
IN_UNITS = {"calculate_per_token_loss": True, "reset_attention_mask": True, "micro_batch_size": 1}
ROWS = [(use, row) for use, rows in UNSUPPORTED.items() for row in rows]
OURS = add_arguments(argparse.ArgumentParser())._option_string_actions


def has_gpu(monkeypatch, capability):
    """Let this machine seem to have a GPU of a compute capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))


def settings_of(row):
    """What turns the feature of a row on."""
    settings = {"use_distributed_optimizer": True}
    words = ["with", *re.split(" (with|and|on|without) ", row.feature)]
    for word, clause in zip(words[::2], words[1::2], strict=True):
        flag, _, values = clause.partition(" ")
        value = 9 if values.startswith("above") else values.split(", ")[0] or True
        found = SETTINGS.get(clause, CLAUSES.get(clause, {setting_of(flag): value}))
        settings |= dict.fromkeys(found, False) if word == "without" else found
    return settings


@pytest.mark.parametrize("use, row", ROWS, ids=[f"{use.name}-{row.feature}" for use, row in ROWS])
def test_an_unsupported_feature_is_one_sentence(monkeypatch, tmp_path, use, row):
    if "this" in row.feature:
        versions = {"flash-linear-attention": (0, 4, 2), "triton": (3, 6, 0)}
        monkeypatch.setattr(conditions, "find_spec", lambda module: None)
        monkeypatch.setattr(conditions, "installed", lambda *names: versions.get(names[0]))
        has_gpu(monkeypatch, capability=9)
    settings = settings_of(row)
    if "pipeline_schedule_file" in settings:
        settings["pipeline_schedule_file"] = tmp_path / "mine.csv"
        settings["pipeline_schedule_file"].write_text("0F0,0B0\n1F0,1B0\n")
        settings.setdefault("pipeline_schedule", None)
    needed = {OurFeature.UNITS: IN_UNITS, OurFeature.PAIRS: IN_PAIRS}.get(use, {})
    args = parsed(*FLAGS[use], **needed)
    vars(args).update(settings)
    with pytest.raises(ValueError) as error:
        validate(args)
    assert str(error.value) == f"{row.feature} {row.because}; {row.way_out}"
    if row.feature.split()[0] not in OURS and use is not OurFeature.EVERY_RUN:
        validate(parsed(**settings))  # with Megatron's own schedule


# Of Megatron-LM's main of 22 August 2026; earlier ones do not have them.
LATER = {
    "--enable-mhc-connections",
    "--moe-combine-bwd-dtype",
    "--moe-dispatch-fwd-dtype",
    "--moe-use-grouped-tensor",
    "--mtp-hsm",
    "--output-logit-dtype",
}


def test_the_flags_of_the_table_are_megatrons_and_off():
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    known = parser._option_string_actions
    flags = {word for _, row in ROWS for word in row.feature.split() if word.startswith("--")}
    flags -= LATER - known.keys()
    assert len(flags) > 60 and {flag: known[flag].dest for flag in flags} == {flag: setting_of(flag) for flag in flags}
    on = [row.feature for _, row in ROWS if row.holds(vars(parser.parse_args([])))]
    assert len(on) == 5 and all(feature.startswith("a run without") for feature in on)


@pytest.mark.parametrize(
    "layout, is_untied, is_refused",
    [
        ("Et|tt|tm|L", True, True),  # the copy for prediction on the rank of the embedding
        ("Et|tt|tm|L", False, True),
        ("Et|ttt|m|L", True, True),
        ("Et|tm|tt|L", False, True),  # on the rank of the tied output
        ("Et|tm|tt|L", True, False),
        ("Et|tt|tt|mL", False, False),
        ("E|(t|)*2tL", False, False),
    ],
)
def test_a_rank_has_one_copy_of_the_embedding(layout, is_untied, is_refused):
    settings = {"pipeline_model_parallel_layout": layout, "pipeline_model_parallel_size": 2}
    settings["untie_embeddings_and_output_weights"] = is_untied
    sentence = first_unsupported(settings, {OurFeature.EVERY_RUN})
    assert (sentence is not None) == is_refused
    settings["pipeline_model_parallel_layout"] = PipelineParallelLayerLayout.from_str(layout, 2)
    assert first_unsupported(settings, {OurFeature.EVERY_RUN}) == sentence


FUSED, DELTA_NETS = SETTINGS["--attention-backend fused"], CLAUSES["G"]


# Later versions of flash-linear-attention refuse to run there, and Megatron names one that is missing.
@pytest.mark.parametrize(
    "feature, versions, is_hopper, is_refused",
    [
        (FUSED, {"transformer-engine": "2.19.1"}, True, True),
        (FUSED, {"transformer-engine": "2.20.0"}, True, False),
        (FUSED, {"transformer-engine": "2.21.0+cu13"}, True, False),
        (DELTA_NETS, {"fla-core": "0.4.2", "triton": "3.3.1"}, True, False),
        (DELTA_NETS, {"fla-core": "0.4.2", "triton": "3.4.0"}, True, True),
        (DELTA_NETS, {"fla-core": "0.4.2", "triton": "3.7.0"}, True, True),
        (DELTA_NETS, {"fla-core": "0.4.2", "triton": "3.7.1+git1"}, True, False),
        (DELTA_NETS, {"fla-core": "0.4.2", "triton": "3.6.0"}, False, False),
        (DELTA_NETS, {"fla-core": "0.5.0.dev1", "triton": "3.6.0"}, True, False),
        (DELTA_NETS, {"triton": "3.6.0"}, True, False),
    ],
)
def test_versions_of_packages_decide(monkeypatch, feature, versions, is_hopper, is_refused):
    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def refused(**settings):
        return first_unsupported(run_of_arguments(parsed(**settings)).settings, {OurFeature.SEGMENTS}) is not None

    monkeypatch.setattr(conditions, "version", version)
    has_gpu(monkeypatch, capability=9 if is_hopper else 8)
    assert refused(**ON_GPU, **feature) == is_refused
    assert not refused(**ON_GPU, **DELTA_NETS, dry_run=True, device="cpu", replaced_on_cpu={})
