"""Who may import whom: no room imports one above it, and the pure ones import neither torch nor Megatron."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "megatron" / "seq1f1b"

TEXT = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
# The rooms that each room may import, by the table that contributors read.
ROWS = dict(re.findall(r"^\| `(\w+)(?:/|\.py)` \| .* \| (.*) \|$", TEXT, re.MULTILINE))
MAY_IMPORT = {
    room: ({*ROWS} - {room} if "all" in allowed else set()) ^ set(re.findall(r"`(\w+)`", allowed))
    for room, allowed in ROWS.items()
}
MAY_IMPORT |= {"__init__": {"arguments", "launch", "process"}, "__main__": {"files", "launch"}}
PURE = {
    "schedule": set(),
    "partition": {"numpy"},
    "files": {"msgspec"},
    "costs": {"msgspec", "numpy"},
    "planner": {"numpy"},
}
PUBLIC_NAMES = re.findall(r'^    "(\w+)",$', (ROOT / "__init__.py").read_text(), re.MULTILINE)


def imported(path: Path) -> set[str]:
    """The full names of the modules that a file imports anywhere, and of what it imports from them."""
    package = [*path.relative_to(ROOT.parents[1]).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


CORE = {"schedule", "partition", "process", "model", "runtime", "arguments"}  # and launch, which joins them
AROUND = {"costs", "planner", "rehearsal", "report", "platform", "commands"}


def test_rooms_have_no_circle_and_the_core_needs_none_around_it():
    assert {*MAY_IMPORT} >= CORE | AROUND
    assert not [(room, MAY_IMPORT[room] & AROUND) for room in CORE if MAY_IMPORT[room] & AROUND]
    TopologicalSorter(MAY_IMPORT).prepare()  # fails for a circle


def test_training_never_reaches_the_planner_and_commands():
    reached = {"__main__", "__init__"}
    while more := set().union(*(MAY_IMPORT[room] for room in reached)) - reached:
        reached |= more
    assert "costs" in reached and not {"planner", "commands"} & reached


def test_every_room_is_in_the_table():
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")} == {*MAY_IMPORT}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room):
    for path in (*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")):
        ours = {name.split(".")[2] for name in imported(path) if name.startswith("megatron.seq1f1b.")}
        assert ours <= MAY_IMPORT[room] | {room}, path
        others = {name.split(".")[0] for name in imported(path) if not name.startswith("megatron.seq1f1b")}
        assert room not in PURE or others <= sys.stdlib_module_names | PURE[room], path


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "pretrain_hybrid.py"])
def test_training_scripts_import_public_names_only(script):
    names = {name for name in imported(ROOT.parents[1] / script) if name.startswith("megatron.seq1f1b")}
    assert names and names <= {f"megatron.seq1f1b.{name}" for name in PUBLIC_NAMES}


def test_public_names_are_documented():
    text = (ROOT.parents[1] / "docs" / "library.md").read_text(encoding="utf-8")
    assert all(f"| `{name}" in text for name in PUBLIC_NAMES)
