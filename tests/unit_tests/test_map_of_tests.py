"""Where a module is tested: in a file of its name, or where its docstring says; where that is the help of a command, a
comment."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "megatron" / "seq1f1b"
UNIT = Path(__file__).parent
TESTS = UNIT.parent
MODULES = sorted(path for path in ROOT.glob("*/**/*.py") if not path.stem.startswith("__"))


def public_names(tree):
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {each.name for each in tree.body if isinstance(each, kinds) and not each.name.startswith("_")}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
def test_a_module_has_its_test(module):
    room = module.relative_to(ROOT).parts[0]
    own = UNIT / room / f"test_{module.stem}.py"
    text = module.read_text(encoding="utf-8")
    named = re.search(r"^(?:# )?Tested in (\S+\.py)(?: by (test_\w+))?\.$", text, re.MULTILINE)
    assert own.is_file() != (named is not None), "a file of its name, or a line in its docstring"
    if named is None:
        return
    file, function = named.groups()
    folder = TESTS if file.startswith("functional_tests/") else UNIT
    words = set(re.findall(r"\w+", (folder / file).read_text(encoding="utf-8")))
    # A launch or a command reaches the module without its names; then the line names the test.
    assert words & ({module.stem, *public_names(ast.parse(text))} if function is None else {function}), named[0]
