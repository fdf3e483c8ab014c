"""How a rehearsal starts, and what it refuses. It has a process for each pipeline stage; none outlives the program."""

import os
import signal
import sys
import time
from argparse import Namespace
from multiprocessing import get_context

import pytest

from megatron.seq1f1b.process.patches import owner_of
from megatron.seq1f1b.rehearsal import prepare
from megatron.seq1f1b.rehearsal.command import run_stages
from megatron.seq1f1b.rehearsal.fakes import check, is_fused_on_gpu, patches, stood_for


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({}, "needs the number of GPUs of the real launch: WORLD_SIZE=64"),
        ({"WORLD_SIZE": "0"}, "needs the number of GPUs of the real launch: WORLD_SIZE=64"),
        ({"WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "1", "RANK": "0"}, "start it without torchrun"),
        ({"WORLD_SIZE": "8", "RANK": "3"}, "start it without torchrun"),
    ],
)
def test_a_wrong_start_ends_with_one_sentence(environment, sentence):
    with pytest.raises(SystemExit, match=sentence):
        prepare(environment)
    prepare({"WORLD_SIZE": "8"})


LAUNCH = Namespace(
    skip_train=False,
    num_experts=None,
    moe_token_dispatcher_type="allgather",
    sft=False,
    reset_attention_mask=False,
    dataloader_inter_document_masking=False,
    sequence_splits=None,
    pipeline_schedule=None,
    pipeline_schedule_file=None,
    unit_tokens=None,
    context_parallel_size=1,
    cp_comm_type=["p2p"],
)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"skip_train": True}, "error: --skip-train leaves no training step to rehearse; drop it"),
        ({"num_experts": 8, "moe_token_dispatcher_type": "flex"}, "error: --moe-token-dispatcher-type flex"),
        (
            {"context_parallel_size": 2},
            "error: --cp-comm-type p2p cannot be rehearsed.* rehearse with --cp-comm-type a2a",
        ),
        ({"sft": True}, "error: Megatron's own schedules with packed documents .* rehearse with --sequence-splits"),
    ],
)
def test_what_cannot_be_rehearsed_ends_with_one_sentence(flags, sentence):
    check(LAUNCH)
    with pytest.raises(SystemExit, match=sentence):
        check(Namespace(**vars(LAUNCH) | flags))
    check(Namespace(**vars(LAUNCH) | {"num_experts": 8, "sft": True, "sequence_splits": 4}))
    check(Namespace(**vars(LAUNCH) | {"context_parallel_size": 2, "cp_comm_type": ["a2a"]}))


@pytest.mark.parametrize(
    "device, layers, backend, is_fused",
    [
        ("cuda", "transformer_engine", "auto", True),
        ("cpu", "transformer_engine", "auto", False),
        ("cuda", "local", "auto", False),
        ("cuda", "transformer_engine", "local", False),
    ],
)
def test_attention_is_fused_where_transformer_engine_computes_it(device, layers, backend, is_fused):
    replaced = {"transformer_impl": layers}
    args = Namespace(device=device, replaced_on_cpu=replaced, attention_backend=Namespace(name=backend))
    assert is_fused_on_gpu(args) == is_fused


def test_what_a_stage_replaces_is_there():
    replaced = {"transformer_impl": "transformer_engine", "apply_rope_fusion": True}
    table = patches(Namespace(device="cuda", replaced_on_cpu=replaced), print)
    assert not [patch.target for patch in table if not hasattr(*owner_of(patch.target))]


def test_numbers_of_eight_bits_are_named_as_not_modelled():
    args = Namespace(**vars(LAUNCH) | {"device": "cpu", "fp8": "e4m3", "fp4": None, "bf16": True})
    (note,) = stood_for(args)
    assert note.startswith("--fp8-format, which is not modelled: everything is computed and counted in bf16")


@pytest.mark.parametrize(
    "fail, code",
    [
        (lambda: sys.exit(3), 3),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "error: the process of rank 4 was ended by signal 9."),
    ],
    ids=["an exit", "a signal"],
)
def test_a_stage_that_fails_ends_the_program(capsys, fail, code):
    with pytest.raises(SystemExit) as end:
        run_stages(lambda: os.write(2, b"what it printed") and fail(), Namespace(), [4])
    assert end.value.code == code and capsys.readouterr().err == "what it printed"


def test_stages_end_when_the_program_is_killed(tmp_path):
    pids = tmp_path / "pids"

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
    while any(is_alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
