"""The code of scripts/gpu_test.sh runs on a CPU, at sizes that measure nothing: what it measures needs a GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from support.launch import ENVIRONMENT, ROOT


def gpu_test(*flags):
    return subprocess.run(
        ["bash", ROOT / "scripts" / "gpu_test.sh", *map(str, flags)],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT | {"PYTHON": sys.executable},
    )


def test_without_a_gpu_every_section_is_named_and_skipped():
    job = gpu_test()
    assert job.returncode == 0
    assert "No GPU is visible" in job.stdout
    assert job.stdout.count("skipped ") == 10


@pytest.mark.parametrize(
    "sections", [(1,), (2, 3), (5,), pytest.param((7, 8, 9, 10), marks=pytest.mark.exhaustive)], ids=str
)
def test_the_code_of_the_sections_runs(tmp_path, sections):
    job = gpu_test("--device", "cpu", "--tiny", "--output", tmp_path / "out.json", "--only", *sections)
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads((tmp_path / "out.json").read_text())["sections"]
    assert len(found) == len(sections)
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
    found = gpu_suite().trained_alike(Logs(own, ours), None, [], {"4 segments": []})
    assert [check["passed"] for check in found["checks"]] == passed


# Finds something, and then compiles for longer than the section lasts, or only sleeps.
SLEEPER = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
path.write_text(json.dumps({"checks": [{"name": "early", "passed": True, "found": ""}], "figures": []}))
print("  · compiling kernels" if "--compiles" in sys.argv else "", flush=True)
time.sleep(8)
print("  · kernels are compiled", flush=True)
"""


@pytest.mark.parametrize("flags, verdicts", [([], ["ok", "not run"]), (["--compiles"], ["ok"])])
def test_running_out_of_time_is_no_failure_and_compiling_is_free(tmp_path, monkeypatch, flags, verdicts):
    module = gpu_suite()
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setattr(module, "HERE", tmp_path)
    suite = module.Suite("cpu", True)
    found = suite.script("sleeper", module.Budget(4), *flags)["checks"]
    assert [module.verdict(check) for check in found] == verdicts
    assert not any(check["passed"] is False for check in found)
    assert suite.process(["false"], module.Budget(-1)) == (module.OUT_OF_TIME, "")


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
    found = gpu_suite().trained_alike(suite, None, ["--own"], {"PP 4": ["--ours"]}, ranks=8)
    saves, *others = suite.commands
    assert (
        "--nproc-per-node=1 " in saves and f"--own --save {tmp_path}/weights --save-interval 1 --train-iters 1" in saves
    )
    assert ["--own" in other for other in others] == [True, False] and "--nproc-per-node=8 " in others[1]
    assert all(f"--load {tmp_path}/weights --finetune" in other for other in others)
    assert [check["passed"] for check in found["checks"]] == [True, True]


def gpu_suite():
    spec = importlib.util.spec_from_file_location("gpu_suite", ROOT / "tests" / "gpu_tests" / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module
