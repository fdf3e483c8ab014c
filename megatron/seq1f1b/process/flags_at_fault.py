"""The flags that an error of Megatron is about, which its message often leaves out.

Tested in process/test_net.py by test_a_check_with_words_names_the_flags_that_these_lack.
"""

import ast
import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any

from .flag_names import ARGUMENTS_OF_FIELDS

_RAISED_BY_CHECKS = (AssertionError, ValueError, TypeError, LookupError, ZeroDivisionError, OSError)
_CALLS_ABOVE_SYSTEM = 4  # in which the flags of an error of the operating system are looked for
_BETWEEN_WORDS = re.compile(r"[\s()\[\]:=;'\"]+")
# A name with an underscore that is no part of a path, of an expression or of quoted text.
_NAME = re.compile(
    r"""
    (?<![\w./\-'"`]) (?:(?:args|self|config)\.)* (?P<name>[a-z][a-z0-9]*(?:_[a-z0-9]+)+) (?![\w/'"`(]|\.\w)
    """,
    re.VERBOSE,
)


def with_flags(words: str, flags: Mapping[str, str]) -> str:
    """Words of Megatron with flags in place of the names of their values, `--num-layers` for `num_layers`. `flags` are
    spellings by names."""

    def spelled(match: re.Match[str]) -> str:
        name = ARGUMENTS_OF_FIELDS.get(match["name"], match["name"])
        return flags.get(name, match[0])

    return _NAME.sub(spelled, words)


def flags_of_check(error: BaseException, flags: Mapping[str, str], words: str) -> str:
    """The values, in brackets, of the flags that a failed check of Megatron compares, without those that the `words` of
    the error say; empty if there are none. `flags` are spellings by names. Errors of the operating system say least,
    and come from functions that get their values from others, so the flags of several callers count."""
    if error.__traceback__ is None or not isinstance(error, _RAISED_BY_CHECKS):
        return ""
    from_inside = reversed(list(traceback.walk_tb(error.__traceback__)))
    calls = list(dropwhile(lambda call: _package(call[0]) in sys.stdlib_module_names, from_inside))
    if not calls or _package(calls[0][0]) == "torch":
        return ""
    parsed = _parsed_flags(error)
    values: dict[str, Any] = {}
    num_calls = _CALLS_ABOVE_SYSTEM if isinstance(error, OSError) else 1
    for frame, line in calls[:num_calls]:
        values = _values_at(frame, line, flags, parsed)
        if values:
            break
    said = " ".join(_BETWEEN_WORDS.split(with_flags(words, flags)))
    written = [_as_written(flag, value) for flag, value in values.items() if flag not in words]
    unsaid = [text for text in written if text not in said]
    if not words:
        unsaid += [f"without {flag}" for flag, value in values.items() if value is None]
    return f" ({', '.join(unsaid)})" if unsaid else ""


def _values_at(
    frame: FrameType, line: int, flags: Mapping[str, str], parsed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The flags that a line of code names, with their values. A variable with the name of a flag counts if it has the
    value of the flag; others, such as the `split` of a data set, only share its name."""
    args = frame.f_locals.get("args")
    values: dict[str, Any] = {}
    for name, is_of_args in _names(frame, line):
        if name not in flags:
            continue
        value = getattr(args, name, None) if is_of_args else frame.f_locals.get(name)
        if is_of_args or all(given.get(name, value) == value for given in parsed):
            values[flags[name]] = value
    return values


def _parsed_flags(error: BaseException) -> list[Mapping[str, Any]]:
    """The `args` of the functions in a traceback, the innermost first, then those of the program: flags by their
    names."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    parsed = [frame.f_locals.get("args") for frame in reversed(frames)]
    # The traceback of a cause starts where it was caught.
    parsed.append(getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None))
    return [args.__dict__ for args in parsed if hasattr(args, "__dict__")]


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def flags_of_path(error: BaseException, path: str, flags: Mapping[str, str]) -> str:
    """The path of a file at fault, with the flag that names it or a folder above it."""
    for values in _parsed_flags(error):
        for name, flag in flags.items():
            given = values.get(name)
            if not isinstance(given, (str, Path)) or not str(given):
                continue
            if str(given) == path:
                return f"{flag} {path}"
            if Path(given) in Path(path).parents and str(given) not in (".", "/"):
                return f"{path} (in {flag})"
    return path


def flags_of_listed_path(error: BaseException, words: str, flags: Mapping[str, str]) -> str:
    """In brackets, the flag with a list of paths of which one is in the `words` of an error; empty if there is none."""
    said = set(_BETWEEN_WORDS.split(words))
    for values in _parsed_flags(error):
        for name, flag in flags.items():
            listed = values.get(name)
            if isinstance(listed, list) and any(isinstance(path, str) and path in said for path in listed):
                return f" (in {flag})"
    return ""


def _names(frame: FrameType, line: int) -> Iterator[tuple[str, bool]]:
    """Yield each name in the statement at a line and in the condition around it, with whether it is an attribute of
    `args`."""
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


def _as_written(flag: str, value: Any) -> str:
    """A flag as it is written on a command line; empty if it was not given, or has several values."""
    if value is True:
        return flag
    if isinstance(value, tuple) and all(isinstance(part, (int, float)) for part in value):  # Megatron's, of one word
        value = ",".join(map(str, value))
    is_one_value = isinstance(value, (int, float, str)) and value is not False
    return f"{flag} {value}" if is_one_value else ""
