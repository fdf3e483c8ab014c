"""The code of scripts/gpu_test.sh runs on a CPU, at sizes that measure nothing: what it measures needs a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_tests import run
from support.launch import ENVIRONMENT, ROOT


def test_without_a_gpu_every_section_is_named_and_skipped():
    command = ["bash", ROOT / "scripts" / "gpu_test.sh"]
    environment = os.environ | ENVIRONMENT | {"PYTHON": sys.executable}
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert "No GPU is visible" in printed and printed.count("skipped ") == 10


@pytest.mark.parametrize(
    "sections", [(1,), (2, 3), (5,), pytest.param((7, 8, 9, 10), marks=pytest.mark.exhaustive)], ids=str
)
def test_the_code_of_the_sections_runs(launch, monkeypatch, tmp_path, sections):
    """Its processes are forks of one that has imported Megatron."""

    def process(suite, command, budget, queues=1):
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

    def process(self, command: list[str], budget: object) -> tuple[None, str]:
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
    found = run.trained_alike(Logs(own, ours), None, [], {"4 segments": []})
    assert [check["passed"] for check in found["checks"]] == passed


# Finds something and then compiles, or only waits, until it is stopped or its time has passed.
SLEEPER = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
print("  · compiling kernels" if "--compiles" in sys.argv else "", flush=True)
path.write_text(json.dumps({"checks": [{"name": "early", "passed": True, "found": ""}], "figures": []}))
while not path.with_name("passed").exists():
    time.sleep(0.05)
print("  · kernels are compiled", flush=True)
"""


@pytest.mark.parametrize("flags, verdicts", [([], ["ok", "not run"]), (["--compiles"], ["ok"])])
def test_running_out_of_time_is_no_failure_and_compiling_is_free(tmp_path, monkeypatch, flags, verdicts):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setattr(run, "HERE", tmp_path)
    now = [0.0]
    suite, passed = run.Suite("cpu", True), []

    def sleep(seconds):
        """A minute passes at once when something has been found, and is being compiled if it is to be."""
        time.sleep(0.05)
        if not passed and [*suite.folder.glob("*.json")] and (not flags or budget.is_stopped):
            now[0] += 60
            passed.append((suite.folder / "passed").touch() if flags else None)

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    budget = run.Budget(4)
    found = suite.script("sleeper", budget, *flags)["checks"]
    assert [run.verdict(check) for check in found] == verdicts
    assert not any(check["passed"] is False for check in found)
    assert suite.process(["false"], run.Budget(-1)) == (run.OUT_OF_TIME, "")


class Starts(Logs):
    """Stands in for a suite; keeps the commands."""

    def __init__(self, folder, number: int) -> None:
        super().__init__(*[[(5.0, 2.0), (4.9, 1.5)]] * number)
        self.folder, self.commands = folder, []

    def process(self, command: list[str], budget: object) -> tuple[None, str]:
        self.commands.append(" ".join(command))
        return super().process(command, budget)


def test_other_layouts_start_from_the_weights_of_one_rank(tmp_path):
    """Megatron draws weights by the layout of the ranks."""
    suite = Starts(tmp_path, 3)
    found = run.trained_alike(suite, None, ["--own"], {"PP 4": ["--ours"]}, ranks=8)
    saves, *others = suite.commands
    assert (
        "--nproc-per-node=1 " in saves and f"--own --save {tmp_path}/weights --save-interval 1 --train-iters 1" in saves
    )
    assert ["--own" in other for other in others] == [True, False] and "--nproc-per-node=8 " in others[1]
    assert all(f"--load {tmp_path}/weights --finetune" in other for other in others)
    assert [check["passed"] for check in found["checks"]] == [True, True]
