"""scripts/check_cluster.sh gives a verdict on two processes of this machine."""

import os
import subprocess

from check_cluster import Facts, verdict
from support.launch import ENVIRONMENT, ROOT
from support.patience import patient


def run(*flags):
    command = ["bash", ROOT / "scripts" / "check_cluster.sh", "--megabytes", "1", *flags]
    environment = os.environ | ENVIRONMENT | {"GPUS_PER_NODE": "2"}
    environment.pop("SLURM_JOB_NODELIST", None)
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patient(360))


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
