"""The flags that an error of Megatron speaks of, which its own words often leave out.

Tested in process/test_net.py by test_a_check_with_words_names_the_flags_that_these_lack.
"""

import ast
import linecache
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any


def flags_of_check(error: BaseException, flags: Mapping[str, str], words: str) -> str:
    """The values, in brackets, of the flags that a failed check of Megatron's compares, but for those that the `words`
    of the error have; empty if there are none. `flags` are spellings by names."""
    if error.__traceback__ is None or not isinstance(
        error, (AssertionError, ValueError, TypeError, LookupError, ZeroDivisionError)
    ):
        return ""
    frame, line = [*traceback.walk_tb(error.__traceback__)][-1]
    if str(frame.f_globals.get("__name__")).startswith("torch"):
        return ""
    args = frame.f_locals.get("args")
    values: dict[str, Any] = {}
    for name, is_of_args in _names(frame, line):
        if name in flags:
            values[flags[name]] = getattr(args, name, None) if is_of_args else frame.f_locals.get(name)
    said = [_given(flag, value) for flag, value in values.items() if flag not in words]
    if not words:
        said += [f"without {flag}" for flag, value in values.items() if value is None]
    named = ", ".join(filter(None, said))
    return f" ({named})" if named else ""


def flags_of_path(error: BaseException, path: str, flags: Mapping[str, str]) -> str:
    """The path of a file at fault, with the flag that names it or a folder above it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    parsed = [frame.f_locals.get("args") for frame in reversed(frames)]
    # The traceback of a cause starts where it was caught.
    parsed.append(getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None))
    for args in parsed:
        values = getattr(args, "__dict__", {})
        for name, flag in flags.items():
            given = values.get(name)
            if not isinstance(given, (str, Path)) or not str(given):
                continue
            if str(given) == path:
                return f"{flag} {path}"
            if Path(given) in Path(path).parents and str(given) not in (".", "/"):
                return f"{path} (in {flag})"
    return path


def _names(frame: FrameType, line: int) -> Iterator[tuple[str, bool]]:
    """Yield each name of the statement at a line, and of the conditions around it, and whether it is one of `args`."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):  # no source
        return
    covering = [node for node in ast.walk(module) if isinstance(node, ast.stmt) and _covers(node, line)]
    parts: list[ast.AST] = []
    for depth, statement in enumerate(reversed(covering[-2:])):  # the innermost one, and that around it
        if isinstance(statement, ast.If):
            parts.append(statement.test)
        elif depth == 0 and not hasattr(statement, "body"):
            parts.append(statement)
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
                yield node.attr, True
            elif isinstance(node, ast.Name):
                yield node.id, False


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _given(flag: str, value: Any) -> str:
    """A flag as it is written on a command line; empty if it was not given, or has several values."""
    if value is True:
        return flag
    is_one_value = isinstance(value, (int, float, str)) and value is not False
    return f"{flag} {value}" if is_one_value else ""
