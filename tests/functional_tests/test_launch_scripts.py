"""The launcher trains the tiny model on the CPU, and refuses what cannot work with one sentence."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from support.files import write_files
from support.launch import ROOT, Job
from support.launchers import SBIN_PATH, run, started
from support.patience import patient

TORCHRUN = "scripts/pretrain.sh"
ITERATIONS = 4
NO_COUNTS = ("TP", "x"), ("PP", "0"), ("SEQUENCE_SPLITS", "-4"), ("TRAIN_ITERS", "1e3"), ("NUM_MICRO_BATCHES", "two")
COMMAND = ["bash", TORCHRUN, "--train-iters", ITERATIONS]


def assert_trained(job: Job) -> None:
    losses = job.check().losses()
    assert len(losses) == ITERATIONS and all(map(math.isfinite, losses)) and losses[-1] < losses[0], losses
    assert "[after training is done]" in job.log


def test_torchrun_launcher_trains():
    done = run(COMMAND, timeout=240)
    assert_trained(Job(done.returncode, done.stdout + done.stderr))
    assert done.stderr.count("No GPU is visible") <= 1


def test_both_scripts_train_a_gpt_with_the_same_losses(launch, tmp_path):
    """To the last digit that is logged; from the same seed."""
    jobs = []
    for script in ("pretrain_hybrid.py", "pretrain_gpt.py"):
        start = started(COMMAND, tmp_path, SCRIPT=script, CHUNKS="2", SEQ_LENGTH="96")
        assert start.script.name == script
        jobs.append(launch(start.ranks, start.flags, start.script))
        assert_trained(jobs[-1])
    hybrid, gpt = jobs
    assert hybrid.losses() == gpt.losses()


PATTERNS = {
    "": "*-*-|*-*-",
    "--num-layers 2": "*-|*-",
    "--num-layers=6": "*-*-*-|*-*-*-",
    "--num-experts 8": "*E*E|*E*E",
    "--multi-latent-attention": "+-+-|+-+-",
    "--mtp-num-layers 2": "*-*-|*-*-/*-/*-",
    "--hybrid-layer-pattern *-*-": "*-*-",
}


@pytest.mark.parametrize("flags", PATTERNS)
def test_a_pattern_has_the_layers_that_flags_ask_for(flags, tmp_path):
    start = started(["bash", TORCHRUN, *flags.split()], tmp_path)
    (place,) = (i for i, word in enumerate(start.flags) if word == "--hybrid-layer-pattern")
    assert start.flags[place + 1] == PATTERNS[flags]


def test_chunks_are_stages_of_the_pattern(tmp_path):
    given = {"CHUNKS": "2", "NUM_LAYERS": "8"}
    assert "*-*-|*-*-|*-*-|*-*-" in started(["bash", TORCHRUN], tmp_path, **given).flags
    assert "G-G-|G-*-|G-G-|G-*-" in started(["bash", TORCHRUN], tmp_path, MODEL="hybrid", **given).flags
    flags = started(["bash", TORCHRUN], tmp_path, SCRIPT="pretrain_gpt.py", **given).flags
    assert "--num-virtual-stages-per-pipeline-rank 2" in " ".join(flags)


def test_layers_are_recomputed_as_one_by_either_script(tmp_path):
    """Attention and MLP of a GPT are two layers of a pattern."""
    for script, layers in (("pretrain_hybrid.py", 2), ("pretrain_gpt.py", 1)):
        flags = started(["bash", TORCHRUN], tmp_path, SCRIPT=script, RECOMPUTE="1").flags
        assert f"--recompute-num-layers {layers}" in " ".join(flags)


@pytest.mark.parametrize("flag", ["--moe-layer-freq 2", "--pipeline-model-parallel-layout=Et|tL"])
def test_what_a_pattern_replaces_is_refused(flag, tmp_path):
    done = run(["bash", TORCHRUN, *flag.split()])
    name = flag.replace("=", " ").split()[0]
    sentence = f"error: {name} goes with SCRIPT=pretrain_gpt.py; for pretrain_hybrid.py give --hybrid-layer-pattern.\n"
    assert (done.returncode, done.stderr) == (1, sentence)
    assert flag.split()[0] in started(["bash", TORCHRUN, *flag.split()], tmp_path, SCRIPT="pretrain_gpt.py").flags


def test_a_hybrid_model_in_segments_has_the_same_losses(launch, tmp_path):
    jobs = []
    for schedule in ("1f1b", "megatron"):
        start = started(COMMAND, tmp_path, MODEL="hybrid", SEQ_LENGTH="96", PIPELINE_SCHEDULE=schedule)
        jobs.append(launch(start.ranks, start.flags, start.script))
        assert_trained(jobs[-1])
    segments, whole = jobs
    assert segments.losses() == pytest.approx(whole.losses(), abs=1e-5)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"MODEL_SIZE": "5b"}, "MODEL_SIZE=5b is unknown: take tiny, 2.7b, 7b, 13b or 30b."),
        ({"GPUS_PER_NODE": "3"}, "not a multiple of TP=1 x PP=2"),
        ({"MODEL_SIZE": "30b", "GPUS_PER_NODE": "8"}, "make 8 processes, which is not a multiple of TP=8 x PP=8"),
        ({"MODEL_SIZE": "7b", "GPUS_PER_NODE": "none"}, "set GPUS_PER_NODE, or try MODEL_SIZE=tiny"),
        (
            {"PYTHON": "no/such/python"},
            "PYTHON=no/such/python does not run, or is older than 3.12: run bash scripts/setup.sh",
        ),
        ({"DATA_PATH": "no/such/data"}, "there is no no/such/data.idx"),
        ({"PRECISION": "fp4"}, "PRECISION=fp4 is unknown"),
        *(({name: value}, f"{name}={value} is not a positive integer.") for name, value in NO_COUNTS),
        ({"EVAL_ITERS": "-1"}, "EVAL_ITERS=-1 is not a number of iterations."),
        ({"DEVICE": "tpu"}, "DEVICE=tpu is unknown: take cuda or cpu."),
        ({"RECOMPUTE": "yes"}, "RECOMPUTE=yes is neither 0 nor 1."),
        ({"DRY_RUN": "yes"}, "DRY_RUN=yes is neither 0 nor 1."),
        ({"DRY_RUN": "1", "WORLD_SIZE": "x"}, "WORLD_SIZE=x is not a positive integer."),
        ({"DRY_RUN": "1", "WORLD_SIZE": "3"}, "WORLD_SIZE=3 is not a multiple of TP=1 x PP=2"),
        ({"MODEL": "bert"}, "MODEL=bert is unknown: take gpt or hybrid."),
        ({"NUM_LAYERS": "5"}, "NUM_LAYERS=5 is not a multiple of PP=2 x CHUNKS=1: change one"),
        ({"SCRIPT": "train.py"}, "SCRIPT=train.py does not train MODEL=gpt: take pretrain_hybrid.py or"),
        (
            {"MODEL": "hybrid", "SCRIPT": "pretrain_gpt.py"},
            "SCRIPT=pretrain_gpt.py does not train MODEL=hybrid: take pretrain_hybrid.py.",
        ),
        ({"DATA_PATH": "README.md", "TOKENIZER_MODEL": "x"}, "there is no README.md.idx"),
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence(settings, sentence):
    """By the quick start, too, before it installs anything."""
    is_of_both = settings.keys() <= {"TRAIN_ITERS", "SEQUENCE_SPLITS", "NUM_MICRO_BATCHES"}
    for script in (TORCHRUN, "scripts/quickstart.sh")[: 1 + is_of_both]:
        done = run(["bash", script], **settings)
        assert done.returncode == 1 and done.stdout == ""
        assert sentence in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", [TORCHRUN, "scripts/slurm/pretrain.sbatch"])
@pytest.mark.parametrize("given, world_size, global_batch_size", [({}, 64, 16), ({"WORLD_SIZE": "512"}, 512, 128)])
def test_dry_run_starts_one_process_that_rehearses(script, given, world_size, global_batch_size, tmp_path):
    start = started(["bash", script, "--seed", "7"], tmp_path, DRY_RUN="1", MODEL_SIZE="30b", **given)
    assert (start.script.name, start.ranks, start.world_size) == ("pretrain_hybrid.py", 1, world_size)
    assert start.flags[:2] == ["--device", "cuda"] and start.flags[-3:] == ["--dry-run", "--seed", "7"]
    assert f"--global-batch-size {global_batch_size} " in " ".join(start.flags)


def test_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    scripts = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch"), ROOT / ".ci" / "run"]
    assert len(scripts) >= 3
    run = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert run.returncode == 0, run.stdout


# As the plugin pyxis: variables of the image win over those that srun passes on.
SRUN_IN_A_CONTAINER = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
    echo "$1"
    shift
done
SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=2 CUDA_MODULE_LOADING=LAZY exec "$@"
"""


@pytest.mark.parametrize("script", ["scripts/check_cluster.sh", "scripts/slurm/pretrain.sbatch"])
def test_ranks_in_a_container_keep_what_the_launcher_sets(script, tmp_path):
    programs = {
        "scontrol": "#!/bin/sh\necho node1\n",
        "srun": SRUN_IN_A_CONTAINER,
        "python": '#!/bin/sh\necho "rank $RANK at $MASTER_ADDR loads kernels $CUDA_MODULE_LOADING"\n',
    }
    write_files(tmp_path, programs)
    for name in programs:
        (tmp_path / name).chmod(0o755)
    allocation = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "2",
    }
    done = run(
        ["bash", script],
        PATH=f"{tmp_path}:{SBIN_PATH}",
        PYTHON=str(tmp_path / "python"),
        GPUS_PER_NODE="2",
        CUDA_MODULE_LOADING="EAGER",
        LOG_DIR=str(tmp_path / "logs"),
        CONTAINER_IMAGE="/shared/image.sqsh",
        CONTAINER_MOUNTS="/shared",
        **allocation,
    )
    assert {"--container-image=/shared/image.sqsh", "--container-mounts=/shared"} <= {*done.stdout.split()}, done.stderr
    assert "rank 0 at node1 loads kernels EAGER" in done.stdout, done.stdout + done.stderr
