"""The newcomer's walk in CONTRIBUTING.md: a family with split backwards is one function and one line."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.launch import python_path
from support.patience import patient

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

VALIDATE = """
import itertools
from pathlib import Path
from megatron.seq1f1b import schedule
from megatron.seq1f1b.schedule import Kind, Placement, Schedule, Shape, build, simulate, validate


def end(made: Schedule) -> float:
    return max(span.end for spans in simulate(made).ranks for span in spans)


assert Path(schedule.__file__).is_relative_to(Path.cwd()), schedule.__file__
assert "gpipe-zb" in schedule.FAMILY_NAMES
for ranks, chunks, microbatches, segments in itertools.product((1, 2, 4), (1, 2), (1, 3, 4), (1, 2, 3)):
    shape = Shape(Placement(ranks, chunks), microbatches, segments)
    made = build("gpipe-zb", shape)
    validate(made)
    assert {action.kind for actions in made.ranks for action in actions} == {Kind.F, Kind.I, Kind.W}
    assert end(made) <= end(build("gpipe", shape))

from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planning.planner.space import Question, families, setups
from megatron.seq1f1b.planning.simulator import predict

model, machine = ModelShape(8, 1024, 4096, 8, 128, 32768), read_machine("a100-80gb")
setup = TrainingSetup(model, 8192, 4, placement=Placement(4), family="gpipe-zb")
assert setup.splits_backward
assert predict(setup, machine).seconds > 0
question = Question(model, machine, 4, 8192, 4)
found = {each.recompute for each in setups(question) if "gpipe-zb" in families(question, each)}
assert "none" in found and "full" not in found
"""


def python(tree: Path, *words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": python_path(tree)}
    run = subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=patient(240)
    )
    assert run.returncode == 0, run.stderr
    return run


def test_the_new_family_is_valid_no_slower_and_a_choice(tmp_path):
    package = tmp_path / "megatron" / "seq1f1b"
    shutil.copytree(ROOT / "megatron" / "seq1f1b", package, ignore=shutil.ignore_patterns("__pycache__"))
    family, line = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / re.search(r"Add this to `(\S+)`", TEXT)[1]
    text = path.read_text()
    table, first = "FAMILIES: Mapping", '        "gpipe": gpipe,\n'
    assert text.count(table) == text.count(first) == 1
    path.write_text(text.replace(table, f"{family}\n\n{table}").replace(first, first + line))
    python(tmp_path, "-c", VALIDATE)
    words = re.search(r"seq1f1b (plot --pipeline-schedule gpipe-zb.*)", TEXT)[1].replace(".png", ".csv").split()
    run = "import sys; from megatron.seq1f1b.commands import main; sys.exit(main(sys.argv[1:]))"
    python(tmp_path, "-c", run, *words)
    assert "0I0.0" in (tmp_path / "gpipe-zb.csv").read_text()
    assert "valid" in python(tmp_path, "-c", run, "check", "gpipe-zb.csv").stdout
