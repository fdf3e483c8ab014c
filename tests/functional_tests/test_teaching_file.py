"""The teaching file in examples/ runs, checks itself, has the order of the package, and is what pages link first."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.seq1f1b.schedule import Placement, Shape, build
from support.launch import ENVIRONMENT, ROOT
from support.patience import patient

FILE = ROOT / "examples" / "seq1f1b_from_scratch.py"
TEXT = FILE.read_text(encoding="utf-8")


def run(script: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, script], env=ENVIRONMENT, capture_output=True, text=True, timeout=patient(60)
    )


def test_the_teaching_file_runs_on_two_processes():
    finished = run(FILE)
    assert finished.returncode == 0, finished.stderr
    assert "rank 0: F0.0 F0.1 F0.2 F0.3 F1.0 B0.3 F1.1" in finished.stdout
    assert "rank 1: F0.0 F0.1 F0.2 F0.3 B0.3 F1.0 B0.2" in finished.stdout
    assert finished.stdout.count("gradients equal those of whole sequences") == 2


def test_the_teaching_file_needs_gradients_of_later_segments(tmp_path):
    collected = "was_read = [entry for entry in own if entry.read.grad is not None]"
    assert TEXT.count(collected) == 1
    wrong = tmp_path / "wrong.py"
    wrong.write_text(TEXT.replace(collected, "was_read = []"))
    finished = run(wrong)
    assert finished.returncode != 0 and "not close" in finished.stderr


@pytest.mark.parametrize("stages, microbatches, segments", [(2, 2, 4), (4, 3, 2), (3, 1, 1), (4, 6, 1), (1, 2, 3)])
def test_the_order_of_the_teaching_file_is_that_of_the_package(monkeypatch, stages, microbatches, segments):
    spec = importlib.util.spec_from_file_location("seq1f1b_from_scratch", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STAGES", stages)
    monkeypatch.setattr(module, "MICROBATCHES", microbatches)
    monkeypatch.setattr(module, "SEGMENTS", segments)
    schedule = build("1f1b", Shape(Placement(stages), microbatches, segments))
    for rank, actions in enumerate(schedule.ranks):
        assert module.order(rank) == [(action.kind, action.microbatch, action.segment) for action in actions]


def test_the_teaching_file_needs_torch_only():
    imports = [node for node in ast.walk(ast.parse(TEXT)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("page", ["README.md", "docs/how-it-works.md"])
def test_the_teaching_file_is_the_first_link_of(page):
    first = re.search(r"\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert (ROOT / page).parent.joinpath(first[1]).resolve() == FILE
