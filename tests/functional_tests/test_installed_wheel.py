"""The wheel, installed with nothing but what it declares: no PyTorch, no Megatron."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest

from support.launch import ROOT
from support.patience import patient

BUILD = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
MODEL = ["--model", "2.7b", "--gpus", "2"]
SHAPE = ["--pipeline-model-parallel-size", "2", "--num-microbatches", "2", "--sequence-splits", "2"]
COMMANDS = [
    ["--version"],
    ["--help"],
    ["--print-completion", "bash"],
    *(
        ["plot", "--pipeline-schedule", "zb-h1", *SHAPE, "--output", f"step.{ending}"]
        for ending in ("csv", "json", "png")
    ),
    ["plot", "--pipeline-schedule", "auto", *SHAPE, "--output", "step.trace.json"],
    ["plot", "--timeline", "step.json", "--output", "again.svg"],
    ["check", "step.csv"],
    ["plan", *MODEL, "--seq-length", "4096", "--global-batch-size", "2", "--output", "plan.png"],
    ["gain-map", *MODEL, "--seq-length", "4096", "--tokens", "8192", "--output", "gains.csv", "--picture"],
    ["train-time", *MODEL, "--seq-length", "4096", "--tokens", "1e9"],
    ["plan-split", "--seq-length", "4096", "--sequence-splits", "2", "--output", "split.png"],
    ["enable", "--folder", "."],
    ["compare", "run", "run", "--output", "compared.png"],
]
LOG = """\
  seq_length ................ 512
 iteration 1/ 1 | elapsed time per iteration (ms): 10.0 | global batch size: 2 | lm loss: 1.0E+00 |
"""
BLOCKED = {"torch", "megatron-core", "tqdm"}


def requirements(installed: PathDistribution, seen: set[str]) -> set[str]:
    """The names of what a distribution needs, and of what that needs in turn, without extras."""
    from packaging.requirements import Requirement

    for line in installed.requires or ():
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in seen:
            seen.add(requirement.name)
            requirements(distribution(requirement.name), seen)
    return seen


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """Python of an environment of the wheel and what it requires, taken from ours."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run([sys.executable, "-c", BUILD, "dist"], cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    venv.create(folder / "environment", symlinks=True)
    (packages,) = folder.glob("environment/lib/python*/site-packages")
    (wheel,) = folder.glob("dist/*.whl")
    shutil.unpack_archive(wheel, packages, "zip")
    (metadata,) = packages.glob("megatron_seq1f1b-*.dist-info")
    names = requirements(PathDistribution(metadata), set())
    assert names >= {"numpy", "matplotlib"} and not names & BLOCKED
    for name in names:
        for top in {Path(file).parts[0] for file in distribution(name).files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(distribution(name).locate_file(top))
    return folder / "environment" / "bin" / "python"


def run(program: Path, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from megatron.seq1f1b.commands import main; sys.exit(main())"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [program, "-I", "-c", code, *words], cwd=folder, env=clean, capture_output=True, text=True, timeout=patient(120)
    )


def test_every_command_but_those_of_training_runs(program, tmp_path):
    for words in COMMANDS:
        if words[0] == "compare":
            (tmp_path / "run" / "trace").mkdir(parents=True)
            (tmp_path / "run" / "log.txt").write_text(LOG)
            timeline = json.loads((tmp_path / "step.json").read_text())
            timeline["meta"] |= {"iteration": 1, "peak_memory_bytes": [1, 1]}
            (tmp_path / "run" / "trace" / "iteration-1-pipeline-0.json").write_text(json.dumps(timeline))
        done = run(program, words, tmp_path)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        if "--output" in words:
            assert (tmp_path / words[words.index("--output") + 1]).stat().st_size


def test_the_page_of_a_package_index_has_no_path(program):
    (metadata,) = program.parents[1].glob("lib/python*/site-packages/megatron_seq1f1b-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert "# Sequence-level pipeline parallelism for Megatron" in text and "](https://arxiv.org/" in text
    assert re.findall(r"\]\((?!https:)[^)]*\)", text) == []
    names = runpy.run_path(str(ROOT / "setup.py"))
    addressed = names["page"]((ROOT / "README.md").read_text(encoding="utf-8"), "https://example.org/o/n")
    assert "](https://example.org/o/n/raw/main/docs/images/1f1b.png)" in addressed
    assert "[Documentation](https://example.org/o/n/blob/main/docs/index.md)" in addressed
    assert re.findall(r"\]\((?!https:)[^)]*\)", addressed) == []


@pytest.mark.parametrize(
    "words",
    [["profile"], ["preprocess", "--input", "pages", "--output-prefix", "text", "--tokenizer-model", "tokenizer"]],
    ids=lambda words: words[0],
)
def test_those_of_training_say_what_is_missing(program, words, tmp_path):
    for folder in ("pages", "tokenizer"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pages" / "page.txt").write_text("A page.")
    done = run(program, words, tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: the package ") and "; pip install '.[train]' in " in done.stderr


def test_every_command_is_tried():
    from megatron.seq1f1b.commands import COMMANDS as ALL

    assert {*ALL} == {words[0] for words in COMMANDS if not words[0].startswith("-")} | {"profile", "preprocess"}
