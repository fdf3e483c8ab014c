"""scripts/check_cluster.sh gives a verdict on two processes of this machine."""

import os

import pytest

from check_cluster import Facts, hidden_gpus, verdict
from support import launchers
from support.launch import ENVIRONMENT, ROOT


def run(*flags, **variables):
    command = ["bash", "scripts/check_cluster.sh", "--megabytes", "1", *flags]
    return launchers.run(command, timeout=360, **ENVIRONMENT | {"GPUS_PER_NODE": "2"} | variables)


def test_a_machine_that_is_ready(tmp_path):
    done = run("--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks on 1 machines, CPU") and done.stdout.endswith("verdict: ready\n")
    assert "GB/s" in done.stdout and "megatron-core 0.19" in done.stdout


def test_what_would_stop_a_training_is_a_sentence_each():
    good = Facts("a", "H100", "torch 2, megatron-core 0.19.2", 1e9, 1e9, (), ())
    assert verdict([good, good]) == []
    others = [good._replace(host="b", versions="torch 1"), good._replace(troubles=("a message arrived changed",))]
    assert verdict([good, good, *others]) == [
        "rank 3 on a: a message arrived changed",
        "rank 2 on b has torch 1; the others have torch 2, megatron-core 0.19.2",
    ]
    assert "is needed" in verdict([good._replace(versions="megatron-core 0.18.0")])[0]


@pytest.mark.parametrize(
    "driver, cuda, why",
    [
        ("535.183.01", "13.0", "(driver 535.183.01), but PyTorch 2.13 sees none: CUDA 13.0 needs driver 580.65"),
        ("580.65.06", "13.0", "look at CUDA_VISIBLE_DEVICES"),
        ("535.183.01", "12.6", "look at CUDA_VISIBLE_DEVICES"),
        ("535.183.01", None, "it is built for CPUs"),
    ],
)
def test_gpus_that_pytorch_does_not_see_are_trouble(driver, cuda, why):
    assert why in hidden_gpus(driver, cuda, "2.13")
    assert hidden_gpus(None, cuda, "2.13") is None


def test_a_driver_that_is_too_old_is_no_ready_machine(launch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 470.57.02\n")
    smi.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script, flags = ROOT / "tools" / "check_cluster.py", ["--folder", tmp_path, "--megabytes", 1]
    job = launch(2, flags, script, env={"PATH": path}, watched=False)
    assert job.code == 1 and job.log.endswith("verdict: not ready\n")
    assert "trouble: rank 0" in job.log and "nvidia-smi lists GPUs (driver 470.57.02)" in job.log
