"""Where a module is tested: in a file of its name, or where its docstring says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "megatron" / "seq1f1b"
TESTS = Path(__file__).parent
ROOMS = ("costs", "planner")  # those whose map is complete
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_module_has_its_test(module):
    own = TESTS / module.parent.name / f"test_{module.stem}.py"
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    named = re.search(r"^Tested in (\S+)\.$", docstring, re.MULTILINE)
    assert own.is_file() != (named is not None), "a file of its name, or a line in its docstring"
    if named is not None:
        assert module.stem in (TESTS / named[1]).read_text(encoding="utf-8"), named[1]
