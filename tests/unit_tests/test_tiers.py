"""Tiers of tests, a run whose time is over, and the names of tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.patience import patient

ROOT = Path(__file__).parents[2]

TESTS = """
import math
from types import SimpleNamespace
import pytest
import pytest_timeout

def test_before():
    pass

def test_that_takes_all_the_time():
    pytest_timeout.time = SimpleNamespace(time=lambda: math.inf)

def test_after():
    assert False

@pytest.mark.exhaustive
def test_of_the_rest():
    assert False
"""


def test_a_run_whose_time_is_over_counts_what_is_left(tmp_path):
    for name in ("unit_tests", "support"):
        (tmp_path / "tests" / name).mkdir(parents=True)
    for file in ("pyproject.toml", "tests/conftest.py", "tests/support/patience.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "tests" / "unit_tests" / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command += ["--session-timeout", "600", "--numprocesses", "1"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take seconds to import
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(60), env=environment)
    assert run.returncode != 0 and "session-timeout" in run.stdout
    lines = [line.split() for line in run.stdout.splitlines()]
    assert ["unit", "2", "tests"] in [words[:3] for words in lines]
    assert ["2", "tests", "were", "not", "reached"] in lines


def test_names_of_tests_have_at_most_60_characters():
    files = (ROOT / "tests").rglob("test_*.py")
    names = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(names) > 500 and [name for name in names if len(name) > 60] == []
