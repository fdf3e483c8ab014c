#!/usr/bin/env python3
"""Every name of megatron-core that this package relies on, and what has changed of it in another version.

    python tools/upstream_names.py --against FOLDER   # of a site-packages or a checkout that has megatron/core

Compares with tools/upstream_names.json, which holds the signatures of the version in constraints.txt; --write renews
it. Nothing is imported, so any version can be compared with any other: names are found in the text of both.
"""

import argparse
import ast
import itertools
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tools" / "upstream_names.json"
SOURCES = ("megatron/seq1f1b/**/*.py", "pretrain_*.py", "tools/**/*.py")
UPSTREAM = re.compile(r"megatron\.(core|training)(\.\w+)*")
_GONE = "gone"


class Upstream:
    """Signatures of names in the source of one version, which lies in `folder`/megatron."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def signature(self, name: str) -> str:
        """The parameters of a function or a class, or the kind of anything else; `gone` if there is no such name."""
        parts = tuple(name.split("."))
        for depth in range(len(parts), 0, -1):
            if (path := self._file(parts[:depth])) is not None:
                return self._within(path, parts[:depth], parts[depth:])
        return _GONE

    def _file(self, parts: tuple[str, ...]) -> Path | None:
        path = self._folder.joinpath(*parts)
        found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
        if found:
            return found[0]
        return path if path.is_dir() else None

    def _within(self, path: Path, module: tuple[str, ...], rest: tuple[str, ...]) -> str:
        if not rest:
            return "module"
        if path.is_dir():
            return _GONE
        node = bindings(path).get(rest[0])
        if isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level + (path.name == "__init__.py")] if node.level else []
            target = [*base, *(node.module or "").split(".")] if node.module else base
            original = next(alias.name for alias in node.names if rest[0] in (alias.asname, alias.name))
            if not UPSTREAM.match(".".join(target)):
                return _GONE if rest[1:] else "imported"
            return self.signature(".".join([*target, original, *rest[1:]]))
        if isinstance(node, ast.ClassDef):
            return self._of_class(node, module, rest[1:])
        return _GONE if node is None or len(rest) > 1 else described(node)

    def _of_class(self, node: ast.ClassDef, module: tuple[str, ...], rest: tuple[str, ...]) -> str:
        own = members(node)
        if not rest:
            return f"class{described(own['__init__'])}" if "__init__" in own else "class"
        if rest[0] in own:
            return described(own[rest[0]])
        if rest[0] in attributes(node):
            return "set by its methods"
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        found = (self.signature(".".join([*module, base, *rest])) for base in bases)
        return next((signature for signature in found if signature != _GONE), _GONE)


@cache
def bindings(path: Path) -> dict[str, ast.AST]:
    """What a module binds at its top, also under `if` and `try`."""
    return bound(ast.parse(path.read_text(encoding="utf-8")).body)


def members(node: ast.ClassDef) -> dict[str, ast.AST]:
    return bound(node.body)


def attributes(node: ast.ClassDef) -> set[str]:
    """What its methods set on `self`."""
    stored = (
        target for target in ast.walk(node) if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    )
    return {target.attr for target in stored if isinstance(target.value, ast.Name) and target.value.id == "self"}


def bound(body: list[ast.stmt]) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            parts = [
                node.body,
                getattr(node, "orelse", []),
                *(handler.body for handler in getattr(node, "handlers", [])),
            ]
            for part in parts:
                found = bound(part) | found  # the first branch counts
    return found


def described(node: ast.AST) -> str:
    """`(self, batch, size=, *rest, last=)`; no annotations, and of defaults only that there is one."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "value"
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    required = len(plain) - len(given.defaults)
    words = [parameter.arg if i < required else f"{parameter.arg}=" for i, parameter in enumerate(plain)]
    if given.vararg:
        words.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        words.append("*")
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        words.append(parameter.arg if default is None else f"{parameter.arg}=")
    if given.kwarg:
        words.append(f"**{given.kwarg.arg}")
    return f"({', '.join(words)})"


@cache
def relied_on() -> dict[str, list[str]]:
    """Dotted names with the files that use them; names that are put together at run time may include some that do not
    exist."""
    found: dict[str, list[str]] = {}
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            for name in set(names(ast.parse(path.read_text(encoding="utf-8")))):
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return dict(sorted(found.items()))


def names(tree: ast.AST) -> Iterator[str]:
    """What a file imports of Megatron, the attributes of it, and the names in its strings: targets of patches."""
    imported: dict[str, str] = {}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = sorted(text for text in texts if re.fullmatch(r"[\w.]{1,80}", text))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and UPSTREAM.fullmatch(node.module or "") and not node.level:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if UPSTREAM.fullmatch(alias.name))
        elif isinstance(node, ast.JoinedStr):
            yield from put_together(node, words)
    yield from imported.values()
    yield from (text for text in texts if UPSTREAM.fullmatch(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            yield f"{imported[node.value.id]}.{node.attr}"


def put_together(node: ast.JoinedStr, words: list[str]) -> Iterator[str]:
    """The names that f"megatron.core.{name}" may stand for, with each word of its file in each placeholder."""
    modules = [word for word in words if UPSTREAM.fullmatch(word)]
    last = [word for word in words if word.isidentifier()]
    parts = []
    for at, part in enumerate(node.values):
        if isinstance(part, ast.Constant):
            parts.append([part.value])
        else:
            parts.append(last if at else modules)
    constants = [part.value for part in node.values if isinstance(part, ast.Constant)]
    # Sentences are no names, and names have few placeholders: the words of a long file would fill more for hours.
    is_name = all(re.fullmatch(r"[\w.]*", text) for text in constants) and len(parts) - len(constants) <= 2
    if is_name and (parts[0] is modules or parts[0][0].startswith("megatron.")):
        yield from filter(UPSTREAM.fullmatch, map("".join, itertools.product(*parts)))


def signatures(folder: Path) -> dict[str, str]:
    """Signatures of the names relied on that are in this version."""
    upstream = Upstream(folder)
    found = {name: upstream.signature(name) for name in relied_on()}
    return {name: signature for name, signature in found.items() if signature != _GONE}


def changes(folder: Path) -> list[str]:
    """A line for every recorded name that is gone from this version or has another signature, with its users."""
    recorded = json.loads(RECORD.read_text())
    upstream = Upstream(folder)
    users = relied_on()
    lines = []
    for name, before in recorded.items():
        now = upstream.signature(name)
        if name in users and now != before:
            lines.append(f"{name} was {before}, is {now}: {', '.join(users[name])}")
    return lines


def installed() -> Path:
    """The folder that the running Python imports megatron.core from."""
    from importlib.util import find_spec

    return Path(find_spec("megatron.core").origin).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="default: the installed megatron-core")
    parser.add_argument("--write", action="store_true", help="record the signatures of that version")
    args = parser.parse_args()
    folder = args.against or installed()
    if args.write:
        RECORD.write_text(json.dumps(signatures(folder), indent=1) + "\n")
        return 0
    lines = changes(folder)
    print("\n".join(lines) or f"All {len(json.loads(RECORD.read_text()))} names are as recorded.")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
