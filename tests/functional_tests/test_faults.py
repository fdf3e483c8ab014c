"""Ranks that are killed or stopped, and a disk that fills, in the middle of a training: what goes on from the last
checkpoint has the losses of an undisturbed run. Every run of the chain is the restart after the fault of the last."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path
from random import Random

import pytest
import torch.distributed as dist
from megatron.training import get_args

from support.launch import ROOT, TINY_GPT, python_path, torchrun
from support.on_ranks import few_of

SCRIPT = Path(__file__).parent / "scripts" / "faulty_script.py"
FLAGS = [*TINY_GPT, "--mock-data", "--pipeline-model-parallel-size", 2, "--sequence-splits", 2, "--train-iters", 7]
FLAGS += ["--hidden-dropout", 0.1]  # a restart goes on with the random numbers, too

# The fault, the iteration that its run starts with, and how many losses it prints.
CHAIN = [
    ("kill forward 2 1", 1, 1),
    ("kill backward 3 0", 2, 1),
    ("kill optimizer 4 1", 3, 1),
    ("kill save 4 1", 4, 1),
    ("stop forward 5 1", 4, 4),
]


@pytest.fixture(scope="module")
def undisturbed(launch):
    """Losses by iteration, counted from 0."""
    losses = launch(2, FLAGS).check().losses()
    assert len(losses) == 7
    return losses


def test_every_restart_goes_on_as_if_nothing_had_happened(launch, undisturbed, tmp_path):
    flags = [*FLAGS, "--save", tmp_path, "--load", tmp_path, "--save-interval", 1]
    for fault, first, count in CHAIN:
        job = launch(2, flags, SCRIPT, env={"FAULT": fault})
        assert (job.code == 0) == fault.startswith("stop"), f"{fault}\n{job.log[-4000:]}"
        # To the last digit that is printed
        expected = undisturbed[first - 1 : first - 1 + count]
        assert job.losses() == pytest.approx(expected, abs=3e-6), f"{fault}\n{job.log[-4000:]}"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 48 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_named_and_costs_one_iteration(launch, undisturbed, small_disk):
    flags = [*FLAGS, "--save", small_disk, "--load", small_disk, "--save-interval", 2]
    job = launch(2, flags, SCRIPT, env={"FAULT": "fill save 4 0"})
    sentence = f"the checkpoint of iteration 4 was not saved; the last complete one is 2; {small_disk}"
    assert job.code == 2 and f"error: --save {small_disk} is full: {sentence} has 0 MiB free" in job.log, job.log[
        -6000:
    ]
    assert "Traceback" not in job.log
    (small_disk / "filler").unlink()
    job = launch(2, [*flags[:-1], 100], SCRIPT).check()
    assert job.losses() == pytest.approx(undisturbed[2:], abs=3e-6)


def test_a_disk_that_the_first_checkpoint_fills_is_named(launch, small_disk):
    (small_disk / "filler").write_bytes(bytes(47 * 2**20))
    job = launch(1, [*TINY_GPT, "--mock-data", "--save", small_disk, "--save-interval", 1])
    kept = f"the checkpoint of iteration 1 was not saved; the last complete one is none; {small_disk} has "
    assert job.code == 2 and f"error: --save {small_disk} is full: {kept}" in job.log, job.log[-4000:]


@pytest.mark.exhaustive
def test_torchruns_restarts_go_on_by_themselves(undisturbed, tmp_path):
    flags = [*FLAGS, "--train-iters", 4, "--lr-decay-iters", 7, "--save", tmp_path, "--load", tmp_path]
    flags += ["--save-interval", 2]
    # torchrun's own store keeps the addresses of the processes that are gone: github.com/pytorch/pytorch/issues/135712.
    environment = {"FAULT": "kill forward 3 1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = python_path(ROOT)
    job = torchrun(SCRIPT, 2, flags, timeout=240, env=environment, options=["--max-restarts", "1"]).check()
    assert job.losses() == pytest.approx(undisturbed[:4], abs=3e-6)


def test_a_loss_that_is_not_a_number_is_placed_and_needs_no_save(launch):
    """A learning rate beyond all bounds makes the second loss one."""
    job = launch(2, [*FLAGS, "--hidden-dropout", 0, "--lr", 1e30, "--lr-warmup-init", 1e30])
    assert job.code not in (0, 1), job.log[-4000:]
    assert "Unexpected result nan" in job.log and "message='the loss is NaN'" in job.log
    assert "Traceback" not in job.log


def test_a_killed_rank_that_nobody_watches_ends_its_peer(launch, tmp_path):
    """After a save: what writes the checkpoint must not keep the connections open at which the peer waits."""
    saves = ("--save", tmp_path / "saved", "--save-interval", 1)
    job = launch(2, [*FLAGS, *saves], SCRIPT, env={"FAULT": "kill forward 3 1"}, watched=False)
    assert job.code == 2 and "Traceback" not in job.log and "GLHF" not in job.log, job.log[-4000:]
    assert re.search(
        r"\nerror: .*the connection to another rank on \S+ broke, .*; the traceback is in \S+\.\n", job.log
    )


@pytest.mark.parametrize("what", few_of(("kill", "fail"), ("fail",)))
def test_a_copy_to_the_host_that_breaks_off_ends_all_ranks(launch, what):
    flags = [*FLAGS, "--pipeline-schedule", "gpipe", "--offload-activations", 1]
    job = launch(2, flags, SCRIPT, env={"FAULT": f"{what} copy 3 0"}, watched=False)
    assert job.codes == ((-signal.SIGKILL, 2) if what == "kill" else (1, 1)), job.log[-4000:]
    if what == "fail":
        assert "OSError: the bus is gone\n[rank0]: pipeline rank 0 failed at 0OFFLOAD" in job.log


@pytest.mark.parametrize("what", ["memory", "stack"])
def test_a_rank_without_memory_ends_all_by_one_sentence(launch, what):
    """Also if it has no memory for threads; `threading.Thread.start` would wait for ever for one that gets a stack and
    nothing else. After the first step it is the traceback that Python prints."""
    for iteration, codes in ((1, (2, 2)), (3, (1, 1))):
        job = launch(2, FLAGS, SCRIPT, env={"FAULT": f"{what} backward {iteration} 1"}, watched=False)
        assert job.codes == codes, job.log[-4000:]
        sentences = re.findall(r"^error: .*$", job.log, re.MULTILINE)
        if iteration == 1:
            (sentence,) = sentences
            assert "a tensor of 1.0 GiB does not fit into the memory of this host" in sentence
            assert "(rank 1 on" in sentence and "Traceback" not in job.log, job.log[-4000:]
        else:
            assert not sentences and job.log.count("Traceback (most recent call last)") == 1, job.log[-4000:]


def test_an_interrupt_is_one_line_and_ends_all_ranks(launch):
    """As Ctrl-C does it, in the middle of a training."""
    job = launch(2, FLAGS, SCRIPT, env={"FAULT": "interrupt forward 3 both"}, watched=False)
    assert job.code > 0 and "Traceback" not in job.log, job.log[-4000:]
    assert job.log.count("error: ") == 1 and "\nerror: interrupted.\n" in job.log, job.log[-4000:]


def soak(flags: list[str]) -> None:
    """pretrain_gpt.py on ranks that stop for a moment at random, and print what they hold as each iteration starts."""
    sys.argv[1:] = flags
    import pretrain_gpt

    own, seen, random = pretrain_gpt.forward_step, set(), Random(dist.get_rank())

    @wraps(own)
    def forward_step(*args, **kwargs):
        iteration = get_args().curr_iteration
        if iteration not in seen:
            seen.add(iteration)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            threads, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
            size = pages * os.sysconf("SC_PAGE_SIZE")
            # In one write, so that no other rank writes between a line and its end.
            print(f"\nheld {dist.get_rank()}: {threads} {files} {size}\n", end="", flush=True)
        if random.random() < 0.03:
            time.sleep(0.1 * random.random())
        return own(*args, **kwargs)

    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main(pretrain_gpt.gpt_config_from_args, {})


@pytest.mark.exhaustive
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("iterations", [60, 2000])
def test_nothing_grows(launch, tmp_path, iterations):
    every = iterations // 10
    flags = [*TINY_GPT, "--mock-data", "--pipeline-model-parallel-size", "2", "--sequence-splits", "3"]
    flags += ["--pipeline-schedule", "zb-h1", "--train-iters", iterations, "--num-layers", "2"]
    flags += ["--eval-interval", every, "--eval-iters", "1", "--save", tmp_path / "saved", "--save-interval", every]
    flags += ["--pipeline-trace", tmp_path / "trace", "--pipeline-trace-iterations"]
    flags += range(every, iterations + 1, every)
    launch.call(2, soak, timeout=5 * iterations, flags=[*map(str, flags)])
    losses = launch.last.losses()
    assert len(losses) == iterations and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert len(list((tmp_path / "trace").iterdir())) == len(list((tmp_path / "saved").glob("iter_*"))) == 10
    for rank in (0, 1):
        held = re.findall(rf"^held {rank}: (\d+) (\d+) (\d+)$", launch.last.log, re.MULTILINE)
        assert len(held) == iterations
        # All that happens has happened by then at least three times.
        before, after = held[3 * every + 2 : 5 * every], held[-2 * every + 2 :]
        for what, more in enumerate((0, 0, 8 * 2**20)):  # threads, files, bytes
            assert max(int(each[what]) for each in after) <= max(int(each[what]) for each in before) + more, what
