"""The code of scripts/gpu_test.sh runs on a CPU, at sizes that measure nothing: what it measures needs a GPU."""

import json
import os
import subprocess
import sys

import pytest

from functional_tests.launch import ENVIRONMENT, ROOT


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
    assert job.stdout.count("skipped ") == 9


@pytest.mark.parametrize(
    "sections", [(1,), (2, 3), (5,), pytest.param((7, 8, 9), marks=pytest.mark.exhaustive)], ids=str
)
def test_the_code_of_the_sections_runs(tmp_path, sections):
    job = gpu_test("--device", "cpu", "--tiny", "--output", tmp_path / "out.json", "--only", *sections)
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads((tmp_path / "out.json").read_text())["sections"]
    assert len(found) == len(sections)
    assert all(check["passed"] is not False for section in found for check in section["checks"])
    assert all(section["checks"] for section in found)
