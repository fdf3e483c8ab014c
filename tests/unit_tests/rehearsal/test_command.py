"""How a rehearsal starts, and what it refuses. It has a process for each pipeline stage; none outlives the program."""

import os
import signal
import sys
import time
from argparse import Namespace
from multiprocessing import get_context
from pathlib import Path

import pytest

from megatron.seq1f1b.process.patches import owner_of
from megatron.seq1f1b.rehearsal import prepare
from megatron.seq1f1b.rehearsal.command import run_stages
from megatron.seq1f1b.rehearsal.fakes import patches
from megatron.seq1f1b.rehearsal.launch import check_launch, hint_of_smaller_batch, replacements
from megatron.seq1f1b.schedule import Costs, Placement, Shape, build, peak_memory
from unit_tests.arguments.parsed import parsed


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "many"},
        {"WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "1", "RANK": "0"},
        {"WORLD_SIZE": "8", "RANK": "3"},
    ],
    ids=str,
)
def test_a_wrong_start_ends_with_one_sentence(environment):
    with pytest.raises(ValueError, match="start it without torchrun, with the number of GPUs .*: WORLD_SIZE=64"):
        prepare(environment)
    prepare({"WORLD_SIZE": "8"})


def launch(**flags):
    off = ["num_experts", "sft", "reset_attention_mask", "dataloader_inter_document_masking", "fp8", "fp4"]
    off += ["use_megatron_fsdp"]
    replaced = {"transformer_impl": "local", "moe_permute_fusion": False, "gradient_accumulation_fusion": False}
    parallel = {"context_parallel_size": 1, "cp_comm_type": ["p2p"], "moe_token_dispatcher_type": "alltoall"}
    replaced |= {"apply_rope_fusion": True, "cuda_graph_impl": "none"}
    rest = {"replaced_on_cpu": replaced, "bf16": True}
    return parsed("--device", "cuda", **dict.fromkeys(off) | parallel | rest | flags)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"num_experts": 8, "moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex .* with alltoall"),
        ({"context_parallel_size": 2}, "--cp-comm-type p2p cannot be rehearsed.* rehearse with a2a"),
        ({"sft": True}, "Megatron's own schedules with packed documents .* rehearse with --sequence-splits"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp cannot be rehearsed.* rehearse with --use-distributed"),
    ],
    ids=["flex", "ring", "documents", "fsdp"],
)
def test_what_cannot_be_rehearsed_ends_with_one_sentence(flags, sentence):
    check_launch(launch())
    with pytest.raises(SystemExit, match=f"error: {sentence}"):
        check_launch(launch(**flags))


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_a_shorter_rehearsal_holds_as_much(family, chunks, segments):
    batch = {"micro_batch_size": 2, "data_parallel_size": 3, "pipeline_model_parallel_size": 4}
    sizes = batch | {"pipeline_schedule": family, "pipeline_schedule_file": None, "unit_tokens": None}
    assert "--global-batch-size 48, which makes 8, " in hint_of_smaller_batch(Namespace(global_batch_size=96, **sizes))
    assert hint_of_smaller_batch(Namespace(global_batch_size=48, **sizes)) is None
    assert hint_of_smaller_batch(Namespace(global_batch_size=96, **sizes | {"pipeline_schedule": "gpipe"})) is None
    peaks = {peak(family, microbatches, chunks, segments) for microbatches in (8, 16, 64)}
    assert len(peaks) == 1


def peak(family, microbatches, chunks, segments):
    """The most that a rank of four holds."""
    shape = Shape(Placement(4, chunks), microbatches, segments)
    return max(peak_memory(build(family, shape), Costs.uniform(shape)))


def test_what_a_rehearsal_replaces_is_there_and_named():
    args = launch()
    assert replacements(args) == []
    (note,) = replacements(launch(fp8="e4m3"))
    assert note.startswith("--fp8-format, which is not modelled: everything is computed and counted in bf16")
    args.replaced_on_cpu["cuda_graph_impl"] = "local"
    (note,) = replacements(args)
    assert note.startswith("CUDA graphs by what they replay")
    args.replaced_on_cpu["transformer_impl"] = "transformer_engine"
    assert not [patch.target for patch in patches(args, print) if not hasattr(*owner_of(patch.target))]


@pytest.mark.parametrize(
    "fail, code",
    [
        (lambda: sys.exit(3), 3),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "error: the process of rank 4 was ended by SIGKILL."),
    ],
    ids=["an exit", "a signal"],
)
def test_a_stage_that_fails_ends_the_program(capsys, fail, code):
    args = Namespace()
    with pytest.raises(SystemExit) as end:
        run_stages(lambda: os.write(2, b"what it printed") and args.rank == 4 and fail(), args, [0, 4])
    assert end.value.code == code and capsys.readouterr().err == "what it printed"


def test_reports_come_in_the_order_of_ranks():
    args = Namespace()
    ranks = range(0, 12, 2)
    assert run_stages(lambda: (args.rank, os.environ["RANK"]), args, ranks) == [(rank, str(rank)) for rank in ranks]


def test_stages_end_when_the_program_is_killed(tmp_path):
    pids = tmp_path / "pids"

    def is_alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    def endless_stage():
        with pids.open("a") as file:
            print(os.getpid(), file=file, flush=True)
        time.sleep(600)

    program = get_context("fork").Process(target=run_stages, args=(endless_stage, Namespace(), range(8)))
    program.start()
    num_stages = min(8, len(os.sched_getaffinity(0)))
    while not pids.exists() or len(pids.read_text().splitlines()) < num_stages:
        time.sleep(0.01)
    os.kill(program.pid, signal.SIGKILL)
    program.join()
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
