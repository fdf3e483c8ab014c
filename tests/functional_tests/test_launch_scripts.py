"""The launcher trains the tiny model on the CPU, and refuses what cannot work with one sentence."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import patient
from support.slurm_cluster import environment

ROOT = Path(__file__).parents[2]
TORCHRUN = "scripts/pretrain_gpt.sh"
ITERATIONS = 4


def losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]


def assert_trained(log: str) -> None:
    found = losses(log)
    assert len(found) == ITERATIONS, log[-3000:]
    assert all(map(math.isfinite, found)) and found[-1] < found[0], found
    assert "[after training is done]" in log


def launched(**settings: str) -> str:
    run = subprocess.run(
        ["bash", TORCHRUN, "--train-iters", str(ITERATIONS)],
        cwd=ROOT, env=environment(PYTHON=sys.executable, **settings), capture_output=True, text=True,
        timeout=patient(240),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    return run.stdout


def test_torchrun_launcher_trains():
    assert_trained(launched())


def test_a_hybrid_model_in_segments_has_the_same_losses():
    segments, whole = (
        launched(MODEL="hybrid", SEQ_LENGTH="96", PIPELINE_SCHEDULE=schedule) for schedule in ("1f1b", "megatron")
    )
    assert_trained(segments)
    assert losses(segments) == pytest.approx(losses(whole), abs=1e-5)


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"MODEL_SIZE": "5b"}, "MODEL_SIZE=5b is unknown: take tiny, 2.7b, 7b, 13b or 30b."),
        ({"GPUS_PER_NODE": "3"}, "not a multiple of TP=1 x PP=2"),
        ({"MODEL_SIZE": "30b", "GPUS_PER_NODE": "8"}, "make 8 processes, which is not a multiple of TP=8 x PP=8"),
        ({"MODEL_SIZE": "7b", "GPUS_PER_NODE": "none"}, "set GPUS_PER_NODE, or try MODEL_SIZE=tiny"),
        ({"PYTHON": "no/such/python"}, "PYTHON=no/such/python does not run: run bash scripts/setup.sh"),
        ({"DATA_PATH": "no/such/data"}, "there is no no/such/data.idx"),
        ({"PRECISION": "fp4"}, "PRECISION=fp4 is unknown"),
        ({"TP": "x"}, "TP=x is not a positive integer."),
        ({"PP": "0"}, "PP=0 is not a positive integer."),
        ({"SEQUENCE_SPLITS": "-4"}, "SEQUENCE_SPLITS=-4 is not a positive integer."),
        ({"TRAIN_ITERS": "1e3"}, "TRAIN_ITERS=1e3 is not a positive integer."),
        ({"NUM_MICRO_BATCHES": "two"}, "NUM_MICRO_BATCHES=two is not a positive integer."),
        ({"EVAL_ITERS": "-1"}, "EVAL_ITERS=-1 is not a number of iterations."),
        ({"DEVICE": "tpu"}, "DEVICE=tpu is unknown: take cuda or cpu."),
        ({"RECOMPUTE": "yes"}, "RECOMPUTE=yes is neither 0 nor 1."),
        ({"DRY_RUN": "yes"}, "DRY_RUN=yes is neither 0 nor 1."),
        ({"DRY_RUN": "1", "WORLD_SIZE": "x"}, "WORLD_SIZE=x is not a positive integer."),
        ({"DRY_RUN": "1", "WORLD_SIZE": "3"}, "WORLD_SIZE=3 is not a multiple of TP=1 x PP=2"),
        ({"MODEL": "bert"}, "MODEL=bert is unknown: take gpt or hybrid."),
        ({"MODEL": "hybrid", "NUM_LAYERS": "5"}, "NUM_LAYERS=5 is not a multiple of PP=2."),
        ({"DATA_PATH": "README.md", "TOKENIZER_MODEL": "x"}, "there is no README.md.idx"),
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence(settings, sentence):
    run = subprocess.run(
        ["bash", TORCHRUN],
        cwd=ROOT,
        env=environment(**{"PYTHON": sys.executable} | settings),
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert run.returncode == 1 and run.stdout == ""
    assert sentence in run.stderr and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


@pytest.mark.parametrize("setting", ["TRAIN_ITERS=x", "SEQUENCE_SPLITS=0", "VOCAB_SIZE=-1"])
def test_the_quick_start_refuses_before_it_installs_anything(setting):
    name, value = setting.split("=")
    run = subprocess.run(
        ["bash", "scripts/quickstart.sh"],
        cwd=ROOT,
        env=environment(**{name: value}),
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"error: {setting} is not a positive integer.\n"


# Stands in for a Python that has torch and Megatron, and prints its command line.
SHOWING_PYTHON = """#!/usr/bin/env bash
if [ "$1" = - ]; then echo "torch megatron.core "; else echo "WORLD_SIZE=$WORLD_SIZE $*"; fi
"""


@pytest.mark.parametrize("script", [TORCHRUN, "scripts/slurm/pretrain_gpt.sbatch"])
@pytest.mark.parametrize("given, world_size, global_batch_size", [({}, 64, 16), ({"WORLD_SIZE": "512"}, 512, 128)])
def test_dry_run_starts_one_process_that_rehearses(script, given, world_size, global_batch_size, tmp_path):
    python = tmp_path / "python"
    python.write_text(SHOWING_PYTHON)
    python.chmod(0o755)
    settings = environment(DRY_RUN="1", MODEL_SIZE="30b", PYTHON=str(python), **given)
    run = subprocess.run(
        ["bash", script, "--seed", "7"],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert run.stdout.startswith(f"WORLD_SIZE={world_size} pretrain_gpt.py --device cuda")
    assert f"--global-batch-size {global_batch_size} " in run.stdout
    assert run.stdout.endswith(" --dry-run --seed 7\n") and "--transformer-impl" not in run.stdout


def test_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    scripts = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch"), ROOT / ".ci" / "run"]
    assert len(scripts) >= 3
    run = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert run.returncode == 0, run.stdout
