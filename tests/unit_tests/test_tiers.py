"""Tiers of tests, and a run whose time is over."""

import shutil
import subprocess
import sys
from pathlib import Path

from support.patience import patient

ROOT = Path(__file__).parents[2]

TESTS = """
import os
import signal
import pytest

def test_before():
    pass

def test_at_the_end():
    os.kill(os.getpid(), signal.SIGUSR1)  # as the timer does
    assert False

def test_after():
    assert False

@pytest.mark.exhaustive
def test_of_the_rest():
    assert False
"""


def run(folder: Path, *options: str) -> str:
    for name in ("unit_tests", "support"):
        (folder / "tests" / name).mkdir(parents=True)
    for file in (ROOT / "pyproject.toml", ROOT / "tests" / "conftest.py", ROOT / "tests" / "support" / "patience.py"):
        shutil.copy(file, folder / file.relative_to(ROOT))
    (folder / "tests" / "unit_tests" / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patient(60)).stdout


def test_a_run_ends_in_the_middle_of_a_test_and_counts_what_is_left(tmp_path):
    printed = run(tmp_path, "--budget", "60")
    assert "1 passed, 3 skipped" in printed
    lines = [line.split() for line in printed.splitlines()]
    assert ["unit", "1", "tests"] in [words[:3] for words in lines]
    left = {words[0]: words[-3:] for words in lines if words[-2:] == ["not", "reached"]}
    assert left == {"unit": ["2", "not", "reached"], "exhaustive": ["1", "not", "reached"]}
