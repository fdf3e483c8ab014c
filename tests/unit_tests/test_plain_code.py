"""What needs two readings and can be recognised stays out of the package, its tools and what its tests share."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron", "tools", "tests/support")
FILES = sorted([*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])


@cache  # every rule looks at every file
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nested_conditionals(tree: ast.AST) -> Iterator[ast.AST]:
    """`a if x else b if y else c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse)):
            yield node


def is_condition(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    if isinstance(node, ast.Name):
        return node.id.startswith(("is_", "has_"))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare | ast.BoolOp)


def multiplied_by_conditions(tree: ast.AST) -> Iterator[ast.AST]:
    """`"text" * has_text` and `[item] * bool(items)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                is_text = isinstance(one, ast.Constant) and isinstance(one.value, str)
                is_sequence = is_text or isinstance(one, ast.JoinedStr | ast.List | ast.Tuple)
                if is_sequence and is_condition(other):
                    yield node


def two_assignments_in_one(tree: ast.AST) -> Iterator[ast.AST]:
    """`a, b = x, y`, unless an old value is used beside its new one, as in `a, b = b, a`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        used = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
        for target in node.targets:
            if isinstance(target, ast.Tuple) and not used & set(map(ast.unparse, target.elts)):
                yield node


def conditionals_in_tuples(tree: ast.AST) -> Iterator[ast.AST]:
    """`return a if x else b, c`, whose condition seems to choose among returns."""
    for node in ast.walk(tree):
        returned = node.value if isinstance(node, ast.Return) else None
        if isinstance(returned, ast.Tuple) and any(isinstance(part, ast.IfExp) for part in returned.elts):
            yield node


def splats_of_the_line_above(tree: ast.AST) -> Iterator[ast.AST]:
    """`sizes = a, b` and then `f(*sizes)`, the only use of the name; the same with a dict."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        loads = [
            each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        ]
        for block in (body for each in ast.walk(function) for body in bodies(each)):
            for line, following in pairwise(block):
                if not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
                    continue
                name = line.targets[0].id
                starred = {each.value for each in ast.walk(following) if isinstance(each, ast.Starred)}
                starred |= {
                    each.value for each in ast.walk(following) if isinstance(each, ast.keyword) and not each.arg
                }
                is_splat = any(isinstance(value, ast.Name) and value.id == name for value in starred)
                if is_splat and isinstance(line.value, ast.Tuple | ast.Dict) and loads.count(name) == 1:
                    yield line


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def variables_named_each(tree: ast.AST) -> Iterator[ast.AST]:
    """`for each in found`, `lambda each: ...`: a variable names what it is."""
    for node in ast.walk(tree):
        is_variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "each"
        if is_variable or (isinstance(node, ast.arg) and node.arg == "each"):
            yield node


RULES = (
    nested_conditionals,
    multiplied_by_conditions,
    two_assignments_in_one,
    conditionals_in_tuples,
    splats_of_the_line_above,
    variables_named_each,
)
EXAMPLES = {
    nested_conditionals: "x = 1 if a else 2 if b else 3",
    multiplied_by_conditions: 'x = " and more" * bool(rest)',
    two_assignments_in_one: "first, second = 1, 'two'",
    conditionals_in_tuples: "def f(a, b):\n    return a if a else b, 1",
    variables_named_each: "names = [each.name for each in found]",
    splats_of_the_line_above: "def f(a, b):\n    sizes = a, b\n    return g(*sizes)",
}


@pytest.mark.parametrize("rule", RULES)
def test_no_file_has(rule):
    found = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in FILES for node in rule(parsed(path))]
    assert len(FILES) > 200 and not found, rule.__doc__


def test_the_package_names_nothing_of_its_own_in_strings():
    """Patches are for Megatron and PyTorch; what a rehearsal replaces of ours is an argument."""
    files = [path for path in FILES if path.is_relative_to(ROOT / "megatron")]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and re.fullmatch(r"megatron\.seq1f1b(\.\w+)+", str(node.value))
    ]
    assert len(files) > 150 and not found


@pytest.mark.parametrize("rule", RULES)
def test_an_example_is_recognised_of(rule):
    assert len(list(rule(ast.parse(EXAMPLES[rule])))) == 1


def test_arguments_named_each_are_recognised():
    assert len(list(variables_named_each(ast.parse("last = max(rows, key=lambda each: each[0])")))) == 1


def test_no_two_classes_share_a_name():
    """One name means one thing; private classes are of their module."""
    files = defaultdict(list)
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.name)
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}
