"""The flags of a plan mean what was planned, to the planner and to a training."""

import argparse
import shlex
from collections import Counter
from dataclasses import replace

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron.seq1f1b.arguments import pipeline_config, run_of_arguments
from megatron.seq1f1b.arguments.config import refuse_unsupported
from megatron.seq1f1b.arguments.unsupported import OurFeature
from megatron.seq1f1b.commands.launch_flags import decided_flags, read_launch
from megatron.seq1f1b.commands.launch_rules import LaunchRules
from megatron.seq1f1b.commands.model_flags import PRESETS, model_of, preset, read_model
from megatron.seq1f1b.commands.parsing import with_values
from megatron.seq1f1b.costs.model_shape import DeltaNet, Experts, LatentAttention
from megatron.seq1f1b.costs.run_costs import RunCosts
from megatron.seq1f1b.costs.training_setup import Fsdp, Moves, TrainingSetup, choices_of
from megatron.seq1f1b.planner.launch_candidate import candidate_of_launch
from megatron.seq1f1b.planner.search import Search
from megatron.seq1f1b.planner.space import Candidate, recomputes, setups
from megatron.seq1f1b.schedule import Placement
from unit_tests.arguments.parsed import parsed
from unit_tests.planner.question import WORDS, candidates, linked, small


def words_of(candidate: Candidate, model: str = WORDS, by_megatron: bool = False) -> list[str]:
    return [*model.split(), *shlex.split(" ".join(decided_flags(candidate, by_megatron)))]


def trained(candidate: Candidate, *more: str, **megatron):
    """The arguments of a training with these flags."""
    ours = {"sequence_split_strategy", "sequence_splits", "pipeline_schedule", "offload_activations"}
    launch = vars(read_launch(words_of(candidate, f"{WORDS} --disable-bias-linear"))).items()
    launch = {name: value for name, value in launch if value is not None and name not in ours}
    flags = [each for each in decided_flags(candidate) if each.startswith(("--pipeline-schedule", "--sequence-split"))]
    return parsed(*more, *shlex.split(" ".join(flags)), **(launch | megatron))


EXPERTS = (
    f"{WORDS} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 256 "
    "--moe-layer-freq [0]+[1]*5"
)
LATENT = f"{WORDS} --multi-latent-attention --q-lora-rank 512 --kv-lora-rank 256 --mtp-num-layers 1"


@pytest.mark.parametrize("model", [WORDS, EXPERTS, LATENT, f"{WORDS} --window-size 128,0 --window-attn-skip-freq 2"])
def test_a_plan_read_back_is_the_same(model):
    question = small(model=model_of(read_model(model.split())))
    for candidate in list(candidates(question))[:: 7 if model is WORDS else 41]:
        launch = read_launch(words_of(candidate, model))
        assert model_of(launch) == candidate.setup.model
        assert candidate_of_launch(launch, question) == candidate
        context, segments = candidate.setup.context_parallel, candidate.setup.segments
        assert min(context, len(segments)) == 1 or not any(length % (2 * context) for length in segments)


@pytest.mark.parametrize("model", [WORDS, EXPERTS])
def test_a_plan_of_megatron_alone_has_no_flag_of_ours(model):
    question = small(model=model_of(read_model(model.split())), num_devices=8, global_batch_size=12).megatron_baseline()
    shares, hidden, more = set(), set(), set()
    for candidate in list(candidates(question))[::3]:
        words = words_of(candidate, model, by_megatron=True)
        launch, setup = read_launch(words), candidate.setup
        assert launch.pipeline_schedule is launch.sequence_splits is None and not launch.keep_logits
        assert candidate_of_launch(launch, question) == candidate
        shares.add(setup.recomputed_share)
        hidden.add(setup.hides_experts)
        assert not (setup.hides_experts and setup.repeats("E"))  # Megatron refuses both
        if setup.placement.num_chunks > 1:
            size = launch.microbatch_group_size_per_virtual_pipeline_stage or setup.pipeline_parallel
            more.add(size > setup.pipeline_parallel)
            # What Megatron's interleaved schedule checks.
            assert setup.pipeline_parallel <= size <= setup.num_microbatches
            assert not 0 < setup.num_microbatches % size < setup.pipeline_parallel
    assert min(shares) < 1 and hidden == ({False, True} if model is EXPERTS else {False}) and more == {False, True}


def test_what_moves_to_the_host_is_read_back():
    for candidate in list(candidates(small()))[::28]:
        setup = replace(candidate.setup, offloads=0.3125)
        words = words_of(replace(candidate, setup=setup))
        assert candidate_of_launch(read_launch(words), small()).setup == setup
        assert ("--no-gradient-accumulation-fusion" in words) == setup.overlaps_data_parallel
        automatic = ["auto" if word == "0.3125" else word for word in words]
        assert candidate_of_launch(read_launch(automatic), small()).setup == candidate.setup
    question = linked(1e12, memory_gib=2.2, host_gib=8).megatron_baseline()
    found = Search(question).best(20)
    assert found[0].candidate.setup.moves is not Moves.UNITS and found[0].host_gib > 0
    for candidate in (each.candidate for each in found):
        launch = read_launch(words_of(candidate, by_megatron=True))
        assert launch.offload_activations == 0 and candidate_of_launch(launch, question) == candidate
    assert {each.candidate.setup.moves for each in found} >= {Moves.MODULES, Moves.LAYERS}


@pytest.mark.parametrize(
    "name, modules",
    [
        ("llama3-8b", ["attn", "mlp"]),
        ("deepseek-v3", ["attn", "mlp", "moe_router", "moe_preprocess"]),
        ("qwen3-next-80b", ["attn", "moe_router", "moe_preprocess"]),
    ],
)
def test_graphs_are_read_back_and_parsed_by_megatron(name, modules):
    question = small(model=preset(name), micro_batches=(1,)).megatron_baseline()
    setup = next(each for each in setups(question) if each.recompute == "none" and not each.hides_experts)
    candidate = Candidate(replace(setup, replays_layers=True, fsdp=Fsdp.OFF))
    flags = [flag for flag in decided_flags(candidate, by_megatron=True) if "cuda-graph" in flag]
    launch = read_launch(shlex.split(" ".join(flags)))
    assert choices_of(vars(launch) | {"num_experts": question.model.experts}, (1,), False)["replays_layers"]
    assert not read_launch(["--cuda-graph-impl", "transformer_engine"]).passed_through, "of Megatron's plans alone"
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parsed_flags = parser.parse_args(shlex.split(" ".join(flags)))
    assert parsed_flags.cuda_graph_impl == "transformer_engine"
    assert {getattr(module, "name", module) for module in parsed_flags.cuda_graph_modules} == {*modules}


def test_the_checkpoints_of_fsdp_are_those_of_its_runs_only():
    kept = read_launch(["--ckpt-format", "torch_dist", "--lr", "1"]).passed_through
    assert kept == ["--ckpt-format torch_dist", "--lr 1"]
    sharded = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
    sharded += " --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16"
    assert read_launch([*sharded.split(), "--lr", "1"]).passed_through == ["--lr 1"]


@pytest.mark.parametrize("fsdp", [each for each in Fsdp if each is not Fsdp.OFF])
def test_what_fsdp_shards_is_read(fsdp):
    question = small()
    sharding = f"{WORDS} --tensor-model-parallel-size 1 --use-megatron-fsdp".split()
    candidate = candidate_of_launch(read_launch([*sharding, "--data-parallel-sharding-strategy", fsdp]), question)
    assert candidate is not None and candidate.setup.fsdp is fsdp
    assert f"--data-parallel-sharding-strategy {fsdp}" in decided_flags(candidate, by_megatron=True)
    by_default = candidate_of_launch(read_launch(sharding), question)
    assert by_default is not None and by_default.setup.fsdp is Fsdp.PARAMETERS


def test_a_dispatcher_that_sends_tokens_once_is_read():
    words = [*EXPERTS.split(), "--tensor-model-parallel-size", "2"]
    question = small(model=model_of(read_model(EXPERTS.split())), num_devices=8)
    for more, once in (([], False), (["--moe-token-dispatcher-type", "flex"], True)):
        candidate = candidate_of_launch(read_launch([*words, *more]), question)
        assert candidate is not None and candidate.setup.dispatches_once == once
    flex = replace(question, dispatches_once=True)
    assert {each.setup.dispatches_once for each in candidates(flex)} == {True}


def test_sizes_of_all_kinds_of_layers_are_read():
    model = preset("deepseek-v3")
    assert model.latent == LatentAttention(1536, 512, 128, 64, 128) and model.prediction_depth == 1
    assert model.experts == Experts(256, 8, 2048, 2048, 8, 4)
    assert preset("qwen3-next-80b").delta_net == DeltaNet(16, 32, 128, 128)
    assert preset("gpt-oss-120b").window_layers == tuple(range(0, 36, 2))


def test_other_flags_of_a_launch_come_back_unchanged():
    launch = "--num-layers 6 --tensor-model-parallel-size 2 --lr 6e-5 --data-path a b --sequence-parallel --bf16"
    assert read_launch(shlex.split(launch)).passed_through == [
        "--num-layers 6",
        "--lr 6e-5",
        "--data-path a b",
        "--bf16",
    ]
    assert candidate_of_launch(read_launch(["--num-layers", "6"]), small()) is None, (
        "no configuration without parallel sizes"
    )


def test_learned_positions_are_parameters_of_the_first_stage():
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128"
    launches = [read_launch(f"{words}{more}".split()) for more in ("", " --position-embedding-type rope")]
    learned, rotary = (TrainingSetup(model_of(each), 128, 1, placement=Placement(2)) for each in launches)
    more = [one[0] - other[0] for one, other in zip(learned.parameters, rotary.parameters, strict=True)]
    assert more == [128 * 64, 0]


OF_4 = "--context-parallel-size 4"


@pytest.mark.parametrize(
    "words, found",
    [
        ("--recompute-activations", {"recompute": "core_attn"}),
        ("--pipe-sp-splits 4 --pipe-sp-strategy even", {"segments": (2048,) * 4}),
        (
            "--pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            {"layers_per_stage": (1, 2, 2, 1)},
        ),
        (f"{EXPERTS} --tensor-model-parallel-size 2", {"expert_parallel": 2}),
        (
            "--hybrid-layer-pattern *-|*|-|*- --pipeline-model-parallel-size 2",
            {"layers_per_stage": (2, 1, 1, 2), "placement": Placement(2, 2)},
        ),
        (OF_4, {"cp_comm_type": "p2p"}),
        (f"{OF_4} --cp-comm-type a2a", {"cp_comm_type": "a2a"}),
        (f"{OF_4} --cp-comm-type a2a --sequence-splits 2", {"cp_comm_type": None}),
        (
            f"{OF_4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            {"cp_comm_type": "a2a+p2p 2 2"},
        ),
    ],
)
def test_other_spellings_and_defaults_of_megatron(words, found):
    launch = read_launch(["--tensor-model-parallel-size", "1", *WORDS.split(), *words.split()])
    setup = candidate_of_launch(launch, small(model=model_of(launch))).setup
    assert {name: getattr(setup, name) for name in found} == found


@pytest.mark.parametrize("name", ["7b", "llama3-8b", "deepseek-v3"])
def test_only_what_a_model_has_is_computed_again(name):
    """Megatron has moe_act for experts alone; with biases, mlp never ends its first backward."""
    question = small(model=preset(name))
    found = set(" ".join(recomputes(question) + recomputes(question.megatron_baseline())).split())
    assert ("mlp" in found) == ("--disable-bias-linear" in PRESETS[name])
    assert {"moe", "moe_act"} & found == ({"moe", "moe_act"} if "--num-experts" in PRESETS[name] else set())
    assert {"none", "layernorm", "full"} <= found


def test_training_cuts_sequences_where_the_plan_does():
    for candidate in (each for each in [*candidates(small())][::7] if each.setup.pipeline_parallel > 1):
        setup, chunks = candidate.setup, candidate.setup.placement.num_chunks
        megatron = {"padded_vocab_size": 32768, "data_parallel_size": setup.data_parallel}
        megatron |= {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
        args = trained(candidate, "--device", "cuda", **megatron)
        config = pipeline_config(args, run := run_of_arguments(args), RunCosts(args, run))
        assert config.lengths == setup.segments
        assert config.run.layers_per_stage == setup.layers_per_stage
        assert config.schedule.name == setup.family
        assert config.run.num_microbatches == setup.num_microbatches


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--bf16", {"bf16": True}),
        ("--fp8-format hybrid", {"fp8": "hybrid", "fp8_recipe": "delayed"}),
        ("--fp8-format=hybrid --fp8-recipe mxfp8", {"fp8": "hybrid", "fp8_recipe": "mxfp8"}),
        ("--moe-shared-expert-overlap", {"moe_shared_expert_overlap": True}),
        ("--moe-expert-capacity-factor 1.5", {"moe_expert_capacity_factor": 1.5}),
        ("--window-size 128,0", {"window_size": (128, 0)}),
        ("--window-size 128,128", {"window_size": (128, 128)}),
        ("--log-params-norm", {"log_params_norm": True}),
        ("--optimizer adam --save-params-interval 5", {"optimizer": "adam", "save_params_interval": 5}),
    ],
)
def test_plans_are_what_training_starts_with(words, settings):
    rules, seen = LaunchRules(with_values(f"{words} --disable-bias-linear".split())), Counter()
    families = ("1f1b", "zb-h1", "breadth-first")
    for candidate in list(candidates(small(families=families, partitions_state=None)))[::11]:
        setup = replace(candidate.setup, partitions_state=candidate.setup.family == "breadth-first")
        candidate = replace(candidate, setup=setup)
        args = trained(candidate, **settings)
        try:
            refuse_unsupported(args, vars(args))
            refusal = None
        except ValueError as error:
            refusal = str(error)
        assert rules.accept(candidate) == (refusal is None), refusal
        seen[refusal is None] += 1
    left_out = [*rules.left_out()]
    assert seen[True] and (seen[False] or not left_out) and (not seen[False] or left_out or "fp8" in words)


def test_what_no_plan_goes_with_is_a_sentence():
    with pytest.raises(ValueError, match="--mtp-num-layers weighs predictions"):
        LaunchRules(["--mtp-num-layers 1"], {OurFeature.SEGMENTS, OurFeature.UNITS})
    (sentence,) = LaunchRules(["--log-params-norm"]).left_out()
    assert sentence.startswith("Plans with --partition-state are left out: --log-params-norm reads weights when")


def test_each_flag_of_a_plan_is_an_item():
    asked = small(families=("1f1b", "zb-h1", "breadth-first"), recomputes=("none", "layernorm", "full"))
    for question in (asked, asked.megatron_baseline()):
        for candidate in [*candidates(question)][::5]:
            moves = Moves.MODULES if question.by_megatron else Moves.UNITS
            moved = replace(candidate, setup=replace(candidate.setup, offloads=0.5, moves=moves))
            flags = decided_flags(moved, question.by_megatron)
            assert flags == with_values(shlex.split(" ".join(flags)))


def test_rules_know_all_that_a_plan_decides():
    hiding = next(each for each in candidates(small()) if each.setup.hides_tensor_exchange)
    split = replace(hiding, setup=replace(hiding.setup, family="zb-h1"))
    rules = LaunchRules([])
    assert rules.accept(hiding) and not rules.accept(split), "--tp-comm-overlap, and weight gradients apart"
    traced = LaunchRules(["--pipeline-trace trace.json"])
    in_pairs = replace(hiding, setup=replace(hiding.setup, hides_experts=True))
    assert traced.accept_of_megatron(hiding) and not traced.accept_of_megatron(in_pairs)
