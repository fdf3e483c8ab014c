"""The newcomer's walks in CONTRIBUTING.md: a family with split backwards is one function and one line, and a kind of
action is a row of facts, a pass and a handler. What the repository asks for in an issue, and runs for a pull request.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import yaml

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

from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planner.space import Question, families, setups
from megatron.seq1f1b.costs.simulator import predict

model, machine = ModelShape(8, 1024, 4096, 8, 128, 32768), read_machine("a100-80gb")
setup = TrainingSetup(model, 8192, 4, placement=Placement(4), family="gpipe-zb")
assert setup.splits_backward
assert predict(setup, machine).seconds > 0
question = Question(model, machine, 4, 8192, 4)
found = {each.recompute for each in setups(question) if "gpipe-zb" in families(question, each)}
assert "none" in found and "full" not in found
"""


TRIMMED = """
from megatron.seq1f1b.platform import cpu

cpu.activate()
from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.report import to_trace
from megatron.seq1f1b.runtime.interpreter import Interpreter
from megatron.seq1f1b.runtime.rank_schedule import RankSchedule
from megatron.seq1f1b.schedule import Action, Costs, Kind, Placement, Schedule, Shape, build, lower, parse_action

assert parse_action("2TRIM") == Action(Kind.TRIM, 2) and str(Action(Kind.TRIM, 2)) == "2TRIM"
assert Interpreter.HANDLERS.keys() == {*Kind}
shape = Shape(Placement(2, 2), 3, 2)
lowered = lower(build("zb-h1", shape))
trimmed = [RankSchedule(actions).actions for actions in lowered.ranks]
for actions, before in zip(trimmed, lowered.ranks, strict=True):
    assert [action for action in actions if action.kind is not Kind.TRIM] == [*before]
    trims = [action for action in actions if action.kind is Kind.TRIM]
    assert len(trims) == 2 and actions[-1] in trims
costs = Costs.uniform(shape, message=0.5)
timeline = execute_lowered(Schedule(shape, tuple(trimmed)), costs)
assert timeline == execute_lowered(lowered, costs)
assert to_trace(timeline)
"""


MY_MODEL = """
import torch


class TokenShift(torch.nn.Module):
    def forward(self, inputs):
        return inputs + torch.cat([torch.zeros_like(inputs[:1]), inputs[:-1]])
"""
SHIFTED = """
import torch
from megatron.seq1f1b.platform import cpu
cpu.activate()
from my_model import TokenShift
from megatron.seq1f1b.model import SegmentContext, attach
from megatron.seq1f1b.runtime.segments.segmentation import segments_of

whole = torch.randn(10, 2, 4, dtype=torch.float64, requires_grad=True)
expected = (TokenShift()(whole) ** 2).sum()
expected.backward()
wanted, whole.grad = whole.grad, None

chunk, context = torch.nn.Sequential(TokenShift()), SegmentContext()
attach([chunk], context)
outputs, loss = [], 0.0
for segment in segments_of(0, [3, 5, 2], None):
    with context.running(segment, keeps_for_backward=True):
        outputs.append((segment, (chunk(whole[segment.start : segment.end]) ** 2).sum()))
for segment, part in reversed(outputs):
    with context.running(segment, keeps_for_backward=True):
        part.backward()
    loss += part.detach()
context.assert_empty()
assert torch.allclose(loss, expected) and torch.allclose(whole.grad, wanted)
"""


def section(title: str) -> str:
    return re.search(rf"^## {title}$(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)[1]


def edited(path: Path, place: str, code: str) -> None:
    """Put code in front of the one `place` in a file."""
    text = path.read_text()
    assert text.count(place) == 1, (path, place)
    path.write_text(text.replace(place, code + place))


def copied_package(tree: Path) -> Path:
    package = tree / "megatron" / "seq1f1b"
    shutil.copytree(ROOT / "megatron" / "seq1f1b", package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def python(tree: Path, *words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": python_path(tree)}
    run = subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=patient(240)
    )
    assert run.returncode == 0, run.stderr
    return run


def test_the_new_family_is_valid_no_slower_and_a_choice(tmp_path):
    copied_package(tmp_path)
    text = section("Add a family of schedules")
    family, line = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = tmp_path / re.search(r"Add this to `(\S+)`", text)[1]
    edited(path, "FAMILIES: Mapping", f"{family}\n\n")
    edited(path, '        "gpipe": gpipe,\n', line)
    python(tmp_path, "-c", VALIDATE)
    command = re.search(r"seq1f1b (plot --pipeline-schedule gpipe-zb[^`]*)", TEXT)[1]
    words = command.replace("\\\n", " ").replace(".png", ".csv").split()
    run = "import sys; from megatron.seq1f1b.commands import main; sys.exit(main(sys.argv[1:]))"
    python(tmp_path, "-c", run, *words)
    assert "0I0.0" in (tmp_path / "gpipe-zb.csv").read_text()
    assert "valid" in python(tmp_path, "-c", run, "check", "gpipe-zb.csv").stdout


def test_the_new_kind_of_action_is_lowered_simulated_and_run(tmp_path):
    package = copied_package(tmp_path)
    text = section("Add a kind of action")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    word, facts, lowering_pass, call, handler = (dedent(block) for block in blocks)
    files = re.findall(r"^\d\. `megatron/seq1f1b/(\S+)`", text, re.MULTILINE)
    kinds, lowering, rank_schedule, interpreter, _ = (package / file for file in files)
    edited(kinds, "\n    # A member equals its value", indent(word, " " * 4))
    edited(kinds, '    }\n)\n"""All that is known', indent(facts, " " * 8))
    edited(lowering, "def _transfers(", lowering_pass + "\n\n")
    edited(rank_schedule, "        self.splits_backwards =", indent(call, " " * 8))
    edited(rank_schedule, "from ..process.ranks import", "from ..schedule.lowering import trim\n")
    edited(interpreter, "    }\n\n\ndef message_shape", indent(handler, " " * 8))
    python(tmp_path, "-c", TRIMMED)


def test_pull_requests_run_the_checks_and_bugs_bring_evidence():
    files = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")}
    steps = files["checks.yml"]["jobs"]["checks"]["steps"]
    assert (ROOT / ".ci" / "run").exists() and {"run": ".ci/run"} in steps
    asked = {field["id"]: str(field["attributes"]) for field in files["bug.yml"]["body"]}
    assert asked.keys() >= {"command", "block", "traceback"} and "seq1f1b-traceback-" in asked["traceback"]


def test_the_new_layer_carries_its_state_over_segments(tmp_path):
    package = copied_package(tmp_path)
    text = section("Add a layer that carries state")
    blocks = [dedent(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    layer, imported, follows = blocks
    files = re.findall(r"^\d\. `megatron/seq1f1b/(\S+?)`", text, re.MULTILINE)
    (package / files[0]).write_text(layer)
    attach = package / files[1]
    edited(attach, "from .segment import SegmentContext", imported)
    table = re.search(r"^_PATCHES = \(\n.*?^\)\n", attach.read_text(), re.MULTILINE | re.DOTALL)[0]
    attach.write_text(attach.read_text().replace(table, follows))
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    python(tmp_path, "-c", SHIFTED)
