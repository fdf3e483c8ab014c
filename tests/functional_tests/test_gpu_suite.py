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


class Logs:
    """Stands in for a suite: what training would print, one log for each start."""

    device, tiny = "cpu", True

    def __init__(self, *steps: list[tuple[float, float]]) -> None:
        self._logs = [
            "".join(
                f" iteration {i} | lm loss: {loss:.6E} | grad norm: {norm:.3f} |\n"
                for i, (loss, norm) in enumerate(run)
            )
            for run in steps
        ]

    def process(self, command: list[str]) -> tuple[None, str]:
        return None, self._logs.pop(0)


@pytest.mark.parametrize(
    "ours, passed",
    [
        ([(5.0, 2.0), (4.9, 1.5), (4.8, 9.0)], [True, True]),
        ([(5.0, 2.0), (4.9, 1.0), (4.8, 1.4)], [True, False]),  # a gradient of the second step is lost
        ([(5.0, 2.0), (4.7, 1.5), (4.8, 1.4)], [False, True]),
        ([(5.0, 2.0)], [False, False]),
    ],
)
def test_training_is_judged_by_losses_and_first_gradients(ours, passed):
    own = [(5.0, 2.0), (4.9, 1.5), (4.8, 1.4)]
    found = run.trained_alike(Logs(own, ours), [], {"4 segments": []})
    assert [check["passed"] for check in found["checks"]] == passed


def test_running_out_of_time_is_no_failure(tmp_path, monkeypatch):
    """What was found until then counts."""
    (tmp_path / "sleeper.py").write_text(
        "import pathlib, sys, time\n"
        "output = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])\n"
        """output.write_text('{"checks": [{"name": "early", "passed": true, "found": ""}]}')\n"""
        "time.sleep(1000)\n"
    )
    monkeypatch.setattr(run, "HERE", tmp_path)
    suite = run.Suite("cpu", True)
    wait = subprocess.Popen.wait

    def until_it_found_something(process, timeout=None):
        while not [*suite.folder.glob("*.json")]:
            time.sleep(0.05)
        return wait(process, 0.1 if timeout and timeout > 100 else timeout)

    suite.until = time.monotonic() + 1000
    with monkeypatch.context() as patches:
        patches.setattr(subprocess.Popen, "wait", until_it_found_something)
        found = suite.script("sleeper")["checks"]
    assert [run.verdict(check) for check in found] == ["ok", "not run"]
    assert not any(check["passed"] is False for check in found)
    suite.until = 0.0
    assert suite.process(["false"]) == (run.OUT_OF_TIME, "")
