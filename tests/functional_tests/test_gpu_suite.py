"""The code of scripts/gpu_test.sh runs on a CPU, at sizes that measure nothing: what it measures needs a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_tests import run
from support.launch import ENVIRONMENT, ROOT


def test_without_a_gpu_every_section_is_named_and_skipped():
    command = ["bash", ROOT / "scripts" / "gpu_test.sh"]
    environment = os.environ | ENVIRONMENT | {"PYTHON": sys.executable}
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert "No GPU is visible" in printed and printed.count("skipped ") == 12


@pytest.mark.parametrize(
    "sections", [(1,), (6,), pytest.param((2, 3, 4, 8, 9, 10, 11, 12), marks=pytest.mark.exhaustive)], ids=str
)
def test_the_code_of_the_sections_runs(launch, monkeypatch, tmp_path, sections):
    """Its processes are forks of one that has imported Megatron."""

    def process(suite, command, queues=1):
        place = next(index for index, word in enumerate(command) if word.endswith(".py"))
        ranks = int(command[place - 1].partition("--nproc-per-node=")[2] or 1)
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
        job = launch(ranks, command[place + 1 :], Path(command[place]), timeout=400, env=environment)
        return f"exit code {job.code}" if job.code else None, job.log

    output = tmp_path / "out.json"
    monkeypatch.setattr(run.Suite, "process", process)
    flags = ["--device", "cpu", "--tiny", "--output", str(output), "--only", *map(str, sections)]
    monkeypatch.setattr(sys, "argv", ["run.py", *flags])
    with pytest.raises(SystemExit) as end:
        run.main()
    found = json.loads(output.read_text())["sections"]
    assert not end.value.code and len(found) == len(sections)
    assert all(check["passed"] is not False for section in found for check in section["checks"])
    assert all(section["checks"] for section in found)


@pytest.mark.parametrize(
    "ours, passed", [([2.0, 1.5], True), ([2.0, 1.0], False), ([2.0], False), ([], False)], ids=str
)
def test_a_run_is_judged_by_the_numbers_of_all_its_steps(ours, passed):
    assert run.agree("norms of gradients", ours, [2.0, 1.51], 1e-2)["passed"] is passed


def test_running_out_of_time_is_no_failure(tmp_path, monkeypatch):
    """What was found until then counts."""
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "output = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])\n"
        """output.write_text('{"checks": [{"name": "early", "passed": true, "found": ""}]}')\n"""
        "os.kill(os.getppid(), signal.SIGALRM)\n"  # as when the time is over
        "time.sleep(1000)\n"
    )
    monkeypatch.setattr(run, "HERE", tmp_path)
    suite = run.Suite("cpu", True)
    suite.until = time.monotonic() + 1000
    assert [run.verdict(check) for check in suite.script("sleeper")["checks"]] == ["ok", "not run"]
    suite.until = 0.0
    assert suite.process(["false"]) == (run.OUT_OF_TIME, "")
