"""An error of Megatron's own checks as one sentence that names the flags that it is about."""

import ast
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import dedent
from types import FrameType

from .ending import TRACEBACK_VARIABLE, end, wants_tracebacks

# Megatron's checks compare a few values; a statement with more names is not a check.
_MOST_FLAGS = 6


@contextmanager
def explained(what: str, parser: ArgumentParser | None, args: Namespace) -> Iterator[None]:
    """End the program with a sentence if the block raises: `what` fails, the message, the flags of the check."""
    try:
        yield
    except Exception as error:
        end(sentence_of(what, error, parser, args), error)


def sentence_of(what: str, error: Exception, parser: ArgumentParser | None, args: Namespace) -> str:
    """`what`, the message of an error, and the flags that the failed check reads, with their values."""
    message = " ".join(str(error).split()).rstrip(".")
    if not message:
        message = f"its check '{_failed_check(error)}' does not hold"
    flags = [
        _with_value(flag, getattr(args, name, None))
        for name, flag in _flags_of(error, parser).items()
        if flag not in message or getattr(args, name, None) is not None
    ]
    concerned = f" ({', '.join(flags)})" if flags else ""
    where = "" if wants_tracebacks() else f"; {TRACEBACK_VARIABLE}=1 shows where"
    return f"{what}: {message}{concerned}{where}"


def _with_value(flag: str, value: object) -> str:
    return flag if value is True else f"{flag} {value}"


def _flags_of(error: Exception, parser: ArgumentParser | None) -> dict[str, str]:
    """Destinations and flags that stand in the statement that raised."""
    if parser is None:
        return {}
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    found = {}
    for node in _failed_nodes(error):
        for part in ast.walk(node):
            name = part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else None
            if name in flags:
                found[name] = flags[name]
    return found if len(found) <= _MOST_FLAGS else {}


def _failed_check(error: Exception) -> str:
    nodes = _failed_nodes(error)
    return ast.unparse(nodes[0]).replace("args.", "") if nodes else type(error).__name__


def _failed_nodes(error: Exception) -> list[ast.AST]:
    """The condition of the assertion, or of the `if` around the raise, in the innermost frame."""
    frame, line = _innermost(error)
    if frame is None:
        return []
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(dedent("".join(lines)))
    except (OSError, SyntaxError):
        return []
    line += 1 - max(first, 1)
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assert, ast.If)) and node.lineno <= line <= node.end_lineno
    ]
    around.sort(key=lambda node: node.end_lineno - node.lineno)
    return [around[0].test] if around else []


def _innermost(error: Exception) -> tuple[FrameType | None, int]:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return (None, 0) if traceback is None else (traceback.tb_frame, traceback.tb_lineno)
