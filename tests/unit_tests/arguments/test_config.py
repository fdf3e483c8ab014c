"""Our flags: what they mean, and how what cannot be honoured is refused."""

import argparse
import importlib
import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
from megatron.core.pipeline_parallel import schedules

import megatron.seq1f1b
from megatron.seq1f1b import arguments, validate
from megatron.seq1f1b.arguments import parse_options, run_of_arguments
from megatron.seq1f1b.costs.run_costs import RunCosts
from megatron.seq1f1b.files.schedule_file import write_schedule
from megatron.seq1f1b.files.timeline_file import write_timeline
from megatron.seq1f1b.launch import overlay
from megatron.seq1f1b.process.patches import Patch, patched
from megatron.seq1f1b.schedule import (
    FAMILY_NAMES,
    PLACEMENTS,
    Kind,
    Placement,
    Schedule,
    ScheduleChoice,
    Shape,
    Timeline,
    build,
    simulate,
    units_to_move,
    with_moves,
)
from unit_tests.arguments.parsed import parsed


def pipeline_config(args):
    run = run_of_arguments(args)
    return arguments.pipeline_config(args, run, RunCosts(args, run))


@pytest.mark.parametrize(
    "flags, schedule, num_segments, strategy",
    [
        ((), None, 1, "balanced"),
        (("--pipeline-schedule", "1f1b"), ScheduleChoice("1f1b"), 1, "balanced"),
        (("--sequence-splits", "4"), ScheduleChoice("1f1b"), 4, "balanced"),
        (("--pipe-sp-splits", "4"), ScheduleChoice("1f1b"), 4, "even"),
        (("--pipe-sp-splits", "4", "--pipe-sp-strategy", "average"), ScheduleChoice("1f1b"), 4, "even"),
    ],
)
def test_flags_choose_a_schedule_and_segments(flags, schedule, num_segments, strategy):
    """Without them Megatron's own schedule runs, whatever ours do not support."""
    config = pipeline_config(parsed(*flags, **{} if flags else {"qk_clip": True}))
    assert (config.schedule, config.num_segments, config.partition.strategy) == (schedule, num_segments, strategy)
    assert sum(config.cut(16384)) == 16384 and config.cut(16384)[0] >= config.cut(16384)[-1]


def test_buffers_of_tp_comm_overlap_have_a_segments_length():
    flags = ("--device", "cuda", "--sequence-splits")
    config = pipeline_config(parsed(*flags, "4", tp_comm_overlap=True))
    assert config.lengths == (4096,) * 4
    for given in ("3",), ("4", "--sequence-split-strategy", "balanced"):
        with pytest.raises(ValueError, match="--tp-comm-overlap .* differ; take --sequence-split-strategy even"):
            pipeline_config(parsed(*flags, *given, tp_comm_overlap=True))

    seen, args = [], argparse.Namespace(seq_length=16384)
    name = "megatron.training.initialize._initialize_tp_communicators"
    table = (
        Patch(name, lambda: seen.append(args.seq_length), "asks"),
        Patch("megatron.training.get_args", lambda: args, "has none"),
    )
    with patched(table), ExitStack() as patches:
        overlay.Overlay(schedules.get_forward_backward_func, patches).use(config)
        importlib.import_module("megatron.training.initialize")._initialize_tp_communicators()
    assert seen == [4096] and args.seq_length == 16384


@pytest.mark.parametrize(
    "ranks, microbatches, least_gain",
    [
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((2, 1, 0.04), (4, 1, 0.05))),
        (4, 2, 0.01),
        (4, 4, 0),
    ],
)
def test_few_units_in_a_v_are_cut_for_the_shortest_step(ranks, microbatches, least_gain):
    """With more micro-batches, and for other orders, segments have equal times."""
    flags = ("--device", "cuda", "--pipeline-schedule", "auto", "--sequence-splits", "8")
    sizes = {"seq_length": 131072, "micro_batch_size": 1, "data_parallel_size": 1, "tensor_model_parallel_size": 8}
    sizes |= {"pipeline_model_parallel_size": ranks, "virtual_pipeline_model_parallel_size": 2}
    looped = parsed(*flags, global_batch_size=microbatches, **sizes)
    args = parsed(*flags, "--pipeline-placement", "v", global_batch_size=microbatches, **sizes)
    costs, config = RunCosts(args, run_of_arguments(args)), pipeline_config(args)
    equal = pipeline_config(looped).lengths
    assert equal == replace(config.partition, planned=None).cut(131072) and sum(config.lengths) == 131072
    shape = Shape(Placement(ranks, 2, "v"), microbatches, 8)
    steps = [
        simulate(config.schedule.resolve(shape, lengths, costs.of_actions), costs.of_actions(lengths)).makespan
        for lengths in (equal, config.lengths)
    ]
    assert steps[0] >= steps[1] * (1 + least_gain)
    assert (equal == config.lengths) == (microbatches > 2)


@pytest.mark.parametrize(
    "sizes, multiple",
    [
        *(
            ({"context_parallel_size": c, "tensor_model_parallel_size": t, "sequence_parallel": True}, multiple)
            for c, t, multiple in ((1, 1, 1), (1, 4, 4), (2, 1, 4), (2, 4, 8), (4, 3, 24))
        ),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 4}, 4),
        *(
            ({"fp8": "hybrid", "fp8_recipe": recipe, "micro_batch_size": sequences}, multiple)
            for recipe, sequences, multiple in (("mxfp8", 1, 32), ("mxfp8", 2, 16), ("blockwise", 1, 128))
        ),
    ],
    ids=str,
)
def test_segments_are_multiples_of_what_shares_them(sizes, multiple):
    """Ranks that divide a segment equally, and tokens that share a scale in 8 bits."""
    assert run_of_arguments(parsed(**sizes)).segment_multiple == multiple


def test_flags_of_older_code_keep_their_meaning_or_have_a_note(caplog):
    """The flags of Seq1F1B's authors, with those that Megatron has removed, and of pull request 3116."""
    removed = ("--no-async-tensor-model-parallel-allreduce", "--DDP-impl", "local", "--data-impl", "mmap")
    args = parsed("--pipe-sp-splits", "4", *removed, "--pipe-sp-strategy", "uniform_comp")
    assert caplog.text.count("has no effect and can be dropped") == 3
    assert pipeline_config(args).lengths == (4922, 4238, 3780, 3444)
    assert not hasattr(args, "data_impl")
    chunked = "--chunked-pipeline-model-parallel"
    args = parsed(f"{chunked}-splits", "4", "--moe-load-balancing-loss-mode-for-chunked-sequence", "all_gather")
    assert pipeline_config(args).lengths == (4096,) * 4
    assert caplog.text.count("has no effect and can be dropped") == 4


def test_spellings_of_one_flag_do_not_contradict_each_other():
    assert parsed("--sequence-splits", "2", "--sequence-splits", "4").sequence_splits == 4
    assert parsed("--pipe-sp-splits", "4", "--sequence-splits", "4").sequence_splits == 4
    for flags in (
        ("--pipe-sp-splits", "4", "--sequence-splits", "2"),
        ("--sequence-splits", "2", "--pipe-sp-splits", "4"),
    ):
        with pytest.raises(ValueError, match="contradicts the . of another spelling .*; drop one"):
            parsed(*flags)


def test_lengths_on_a_command_line_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match="put the lengths into a file, and give it to --sequence-split-file"):
        parsed("--chunked-pipeline-model-parallel-split-lengths", "20", "44")


AUTO = ("--sequence-splits", "auto", "--device", "cuda", "--dry-run")


def test_auto_takes_the_segments_of_the_shortest_step_that_fits():
    def chosen(memory=10000, **sizes):
        sizes = {"pipeline_model_parallel_size": 8, "bf16": True, "replaced_on_cpu": {}, **sizes}
        args = parsed(*AUTO, "--device-memory", str(memory), **sizes)
        config = validate(args)
        assert args.sequence_splits == config.num_segments and config.schedule == ScheduleChoice("1f1b")
        return config

    def number(length, memory=10000, **sizes):
        return chosen(memory, seq_length=length, **sizes).num_segments

    # More micro-batches leave less of a bubble to shrink; less memory needs more segments.
    many = {"global_batch_size": 4096}
    assert number(256) == 1 and 2 < number(32768) > number(32768, **many)
    assert number(65536, 24, **many) > number(65536, **many)
    config, seconds = chosen(), {}
    for count in (1, 2, 3, 4, 6, 8, 12, 16):
        lengths = config.partition.cut(16384, count)
        seconds[count] = config.partition.costs.forecast(config.schedule, lengths).seconds
    assert min(seconds, key=seconds.get) == config.num_segments


GROUPED = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True, "add_bias_linear": True}


def test_auto_plans_whole_backwards_where_none_can_be_split(caplog):
    config = validate(parsed("--pipeline-schedule", "auto", **GROUPED))
    assert config.schedule == ScheduleChoice("auto", split=False)
    assert caplog.text.count("without splitting backwards: --moe-grouped-gemm with biases") == 1
    shape = Shape(Placement(2), 6)
    schedule = config.schedule.resolve(shape, config.lengths, config.partition.costs.of_actions)
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    assert Kind.B in kinds and not kinds & {Kind.I, Kind.W}
    assert validate(parsed("--pipeline-schedule", "auto")).schedule == ScheduleChoice("auto")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_layers_spread_unevenly_over_chunks_are_predicted(family, placement, capsys):
    """One stage has no layer."""
    flags = ("--pipeline-schedule", family, "--pipeline-placement", placement, "--sequence-splits", "16")
    sizes = {"virtual_pipeline_model_parallel_size": 3, "bf16": True}
    config = validate(parsed(*flags, pipeline_model_parallel_layout="Et*7|t*5||t*9|t*10|tL", **sizes))
    assert config.run.layers_per_stage == (7, 5, 0, 9, 10, 1) and config.num_segments == 16
    assert "predicted step" in capsys.readouterr().out
    if placement == "v":
        with pytest.raises(ValueError, match="there is one; add --num-virtual-stages-per-pipeline-rank 2"):
            validate(parsed(*flags))


CONTRADICTIONS = (
    {"pipeline_model_parallel_size": 4},
    {"virtual_pipeline_model_parallel_size": 2},
    {"global_batch_size": 16},
    {"sequence_splits": None},
    GROUPED,
)


def test_a_file_with_the_sizes_of_the_flags_replaces_a_family(tmp_path):
    schedule, file = build("zb-h1", Shape(Placement(2), 3, 2)), str(tmp_path / "mine.csv")
    write_schedule(schedule, file)
    config = validate(parsed("--pipeline-schedule-file", file, "--sequence-splits", "2"))
    assert config.schedule == ScheduleChoice.of(schedule)
    assert pipeline_config(parsed("--pipeline-schedule-file", file, *AUTO, replaced_on_cpu={})).num_segments == 2
    for settings in CONTRADICTIONS:
        args = parsed("--pipeline-schedule-file", file, "--sequence-splits", "2")
        vars(args).update(settings)
        with pytest.raises(ValueError, match=r"^.+\Z"):  # one line
            validate(args)


def test_layers_without_fast_attention_get_ours_unless_declined():
    def get_ours(*flags, backend="auto", **megatron):
        args = parsed(*flags, attention_backend=argparse.Namespace(name=backend), **megatron)
        return pipeline_config(args).wants_segment_attention

    assert get_ours() and not get_ours(backend="local") and not get_ours(qk_clip=True)
    assert not get_ours("--device", "cuda", transformer_impl="transformer_engine")
    assert get_ours("--device", "cpu", transformer_impl="transformer_engine")  # its kernels are for GPUs
    assert not get_ours(reset_attention_mask=True)


def test_balanced_looks_at_the_slowest_stage():
    flags = ("--sequence-splits", "4", "--sequence-split-strategy", "balanced", "--device", "cuda")
    whole = pipeline_config(parsed(*flags)).cut(32768)
    pipeline = pipeline_config(parsed(*flags, pipeline_model_parallel_size=8, padded_vocab_size=262144)).cut(32768)
    # The head, which costs every token alike, is a large part of the last of eight stages.
    assert whole[0] > pipeline[0] > 8192 > pipeline[-1] > whole[-1]


@pytest.mark.parametrize("flags", [(), ("--sequence-splits", "8")], ids=["number found", "number given"])
def test_terapipe_finds_the_segments_once(flags):
    args = parsed("--sequence-split-strategy", "terapipe", "--device", "cuda", *flags, pipeline_model_parallel_size=8)
    module = sys.modules["megatron.seq1f1b.partition.terapipe"]
    with patch.object(module, "_least_latency", wraps=module._least_latency) as solve:
        config = validate(args)
        assert config.cut(16384) == config.lengths
    solve.assert_called_once()
    assert config.schedule == ScheduleChoice("1f1b") and args.sequence_splits == len(config.lengths) > 4


def test_a_file_gives_the_segments(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("8192 4096 4096")
    config = validate(parsed("--sequence-split-file", str(path)))
    assert config.schedule == ScheduleChoice("1f1b") and config.cut(16384) == (8192, 4096, 4096)
    with pytest.raises(ValueError, match="--qk-clip"):  # a file means segments, so what segments refuse is refused
        validate(parsed("--sequence-split-file", str(path), qk_clip=True))


def test_a_trace_serves_as_a_profile_of_any_number_of_segments(tmp_path):
    config = pipeline_config(parsed("--sequence-splits", "4"))
    costs = config.partition.costs.of_actions((4096,) * 4)
    step = simulate(build("1f1b", Shape(Placement(2), 3, 4)), costs)
    path = tmp_path / "iteration-3-pipeline-0.json"
    write_timeline(Timeline(step.shape, step.ranks, "s", {"segment_lengths": [4096] * 4}), path)
    flags = ("--sequence-split-strategy", "profile", "--sequence-split-profile", str(path))
    # A trace holds for experts and tensor parallelism, too.
    config = validate(parsed("--sequence-splits", "3", *flags, num_experts=8, tensor_model_parallel_size=2))
    first, second, third = config.cut(16384)
    assert first > second > third

    with pytest.raises(ValueError, match="it has 2 stages, the model 4"):
        validate(parsed("--sequence-splits", "3", *flags, pipeline_model_parallel_size=4))
    with pytest.raises(ValueError, match="give --sequence-splits"):
        validate(parsed("--sequence-split-strategy", "terapipe", *flags[2:]))


def test_too_short_segments_warn_with_a_number_that_is_enough(caplog):
    """A layer of 7B, 1/8 of it a rank: 402 MFLOP a token over 8 · 210 TFLOP/s, and 0.9 ms of its host."""
    even = ("--device", "cuda", "--sequence-split-strategy", "even")
    eighth = dict(ffn_hidden_size=16384, tensor_model_parallel_size=8, micro_batch_size=1, seq_length=32768)
    validate(parsed("--sequence-splits", "32", *even, **eighth))
    (sentence,) = caplog.messages
    assert "the segment of 1024 tokens takes a GPU about 0.2" in sentence
    most = int(re.search(r"--sequence-splits (\d+) keeps GPUs busy", sentence)[1])
    assert 8 <= most <= 16
    # As long as the host takes: 0.9 ms over the 0.2 ms and more of 1024 tokens.
    assert 1024 * 0.9 / 0.25 <= int(re.search(r"less than about (\d+) tokens", sentence)[1]) <= 1024 * 0.9 / 0.2
    caplog.clear()
    validate(parsed("--sequence-splits", str(most // 2), *even, **eighth))
    assert caplog.text == ""
    validate(parsed("--sequence-splits", "4", *even, **{**eighth, "seq_length": 2048}))
    assert "whole sequences keep GPUs busier" in caplog.text


@pytest.mark.parametrize("flag", ["reset_attention_mask", "sft", "dataloader_inter_document_masking"])
def test_our_schedules_keep_documents_apart_as_the_flags_ask(flag):
    def follows(*flags, **megatron):
        return pipeline_config(parsed(*flags, **megatron)).follows_documents

    packed, whole = {flag: True}, ("--pipeline-schedule", "1f1b")
    assert follows("--sequence-splits", "4", **packed) and follows(*whole, **packed)
    assert not follows("--sequence-splits", "4") and not follows(**packed)
    # A model that segments cannot serve keeps Megatron's attention, and with it Megatron's way to mark documents.
    assert not follows(*whole, context_parallel_size=2, **packed)


@pytest.mark.parametrize("feature", [{"qk_clip": True}, {"window_size": (4, 2)}, {"moe_expert_capacity_factor": 1.0}])
@pytest.mark.parametrize("word", ["keep_documents_apart", "--recompute-keeps-attention"])
def test_what_attends_as_segments_do_needs_that_they_can(word, feature):
    """With whole sequences, too, whose attention would else be Megatron's, across documents."""
    flags, asked = ("--pipeline-schedule", "1f1b"), {word.strip("-").replace("-", "_"): True}
    asked["recompute_granularity"] = "full"
    with pytest.raises(ValueError, match=f"^{word} attends as segments do, and --.*; drop one of the two$"):
        pipeline_config(parsed(*flags, **asked, **feature))
    assert pipeline_config(parsed(*flags, **feature)).schedule == ScheduleChoice("1f1b")
    config = pipeline_config(parsed(*flags, **asked))
    assert config.follows_documents != config.flags.recompute_keeps_attention


def test_activations_move_to_the_host_where_they_can():
    assert pipeline_config(parsed("--pipeline-schedule", "gpipe", "--offload-activations", "0.5")).offloads == 0.5
    assert parse_options({"offload_activations": 1}).offload_activations == 1
    for wrong in ("1.5", "-1", "nan", "half"):
        with pytest.raises(ValueError, match=f"--offload-activations: '{wrong}' is neither a fraction from 0 to 1 nor"):
            parse_options({"offload_activations": wrong})


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"dry_run": True}, "--dry-run rehearses scripts with Megatron's arguments, which this program lacks; drop it"),
        ({"device_memory": 40}, "--device-memory needs --dry-run; add that, or drop it"),
        ({"pipeline_trace_iterations": 2}, "--pipeline-trace-iterations needs --pipeline-trace; add that, or drop it"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_keyword_without_effect_is_refused(options, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        parse_options(options)


def test_no_more_moves_than_the_memory_asks_for():
    sizes = {"pipeline_model_parallel_size": 8, "global_batch_size": 16, "data_parallel_size": 1, "seq_length": 65536}
    sizes |= {"bf16": True, "replaced_on_cpu": {}}
    flags = ("--sequence-splits", "8", "--device", "cuda", "--dry-run")

    def made(share, memory):
        memories = ("--offload-activations", str(share), "--device-memory", str(memory))
        return pipeline_config(parsed(*flags, *memories, **sizes))

    def needed(share):
        config = made(share, 80)
        return config.partition.costs.forecast(config.schedule, config.lengths).total_bytes / 2**30 / 0.9

    most, least = needed(0), needed(1)
    assert made("auto", 1.01 * most).offloads == 0 and made("auto", 0.5 * least).offloads == 1
    memory = [needed(sixteenths / 16) for sixteenths in range(17)]
    assert memory == sorted(memory, reverse=True), "so the least share that fits is found by halving"
    found = made("auto", (most + least) / 2).offloads
    assert needed(found) <= (most + least) / 2 < needed(found - 1 / 16)
    args = parsed(*flags, "--offload-activations", "auto", **sizes)
    run = replace(run_of_arguments(args), layers_per_stage=())
    with pytest.raises(ValueError, match="^costs are those of a transformer of known sizes"):
        arguments.pipeline_config(args, run, RunCosts(args, run))


PAIRS = {
    "overlap_moe_expert_parallel_comm": True,
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


def test_forwards_beside_backwards():
    """Megatron's configuration of a model must not see the flag: it would ask for several chunks. More units wait."""
    found = {}
    for pairs in (True, False):
        args = parsed("--sequence-splits", "4", **PAIRS | {"overlap_moe_expert_parallel_comm": pairs})
        config = validate(args)
        assert config.schedule.pairs == pairs and not args.overlap_moe_expert_parallel_comm
        found[pairs] = config.partition.costs.forecast(config.schedule, config.lengths)
    assert found[True].activations > 1.2 * found[False].activations
    assert not ScheduleChoice("1f1b").pairs and ScheduleChoice("1f1b", pairs=True).title == "1f1b in pairs"


def test_a_file_brings_its_pairs(tmp_path):
    shape = Shape(Placement(2), 3, 2)
    for name, pairs in (("with", True), ("without", False)):
        write_schedule(build("1f1b", shape, pairs=pairs), tmp_path / f"{name}.csv")
    file = ("--sequence-splits", "2", "--pipeline-schedule-file")
    assert validate(parsed(*file, str(tmp_path / "with.csv"), **PAIRS)).schedule.pairs
    with pytest.raises(ValueError, match="^a run without --expert-model-parallel-size above 1 has no exchange of"):
        validate(parsed(*file, str(tmp_path / "with.csv")))
    with pytest.raises(ValueError, match="^--pipeline-schedule-file has no pairs such as 2F3.1|2B1.0, which --overlap"):
        validate(parsed(*file, str(tmp_path / "without.csv"), **PAIRS))


def test_a_schedule_with_moves_leaves_none_to_the_flag(tmp_path):
    shape = Shape(Placement(1), 8)
    [order] = build("gpipe", shape).ranks
    write_schedule(Schedule(shape, (with_moves(order, units_to_move(order, 1)),)), tmp_path / "moves.csv")
    flags = ("--pipeline-schedule-file", str(tmp_path / "moves.csv"))
    sizes = {"pipeline_model_parallel_size": 1, "global_batch_size": 16, "data_parallel_size": 1}
    assert pipeline_config(parsed(*flags, **sizes)).schedule.has_moves
    with pytest.raises(ValueError, match="^--pipeline-schedule-file has OFFLOAD and RELOAD .* --offload-activations$"):
        pipeline_config(parsed(*flags, "--offload-activations", "0.5", **sizes))
    with pytest.raises(ValueError, match="^--cpu-offloading-num-layers"):
        pipeline_config(parsed(*flags, cpu_offloading_num_layers=2, **sizes))


def test_lengths_follow_documents_where_the_strategy_can():
    documents = [(0, 8192, *range(8448, 16384, 256))]

    def cuts(*flags):
        config = pipeline_config(parsed("--sequence-splits", "4", *flags))
        return config.partition.follows_documents, config.cut(16384, documents) != config.cut(16384)

    for strategy, follows in (("balanced", True), ("even", False), ("uniform_comp", False)):
        assert cuts("--sequence-split-strategy", strategy) == (follows, follows)


def test_what_validate_made_is_what_everybody_gets(monkeypatch):
    monkeypatch.setattr(overlay, "_overlay", overlay.Overlay(schedules.get_forward_backward_func, ExitStack()))
    config = validate(parsed("--sequence-splits", "4", sft=True))
    for _ in range(3):  # as for every batch of --sft
        assert megatron.seq1f1b.pipeline_config() is config and config.follows_documents
