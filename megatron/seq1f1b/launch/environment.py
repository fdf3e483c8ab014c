"""Programs that nobody edits: the variable SEQ1F1B in the environment stands for a call of `install`.

`seq1f1b enable` (commands/enable.py) adds a line to this Python's site-packages. It calls `watch` in every process that
has the variable, so also in those that a framework starts. When such a process has imported megatron.core, our
schedules are installed.

Tested in functional_tests/test_environment.py by test_the_variable_reaches_a_program_and_its_workers.
"""

import importlib.util
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "SEQ1F1B"

_MEGATRON = "megatron.core"
_log = logging.getLogger("megatron.seq1f1b")


def watch() -> None:
    """Install our schedules as soon as this process imports Megatron, or now if it has."""
    if _MEGATRON in sys.modules:
        _install()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def stop_watching() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]


def keywords(text: str) -> dict[str, Any]:
    """Our flags as keywords of `install`: {"segment_tokens": ["8192"]} for `--segment-tokens 8192`, "8192" for
    `--segment-tokens=8192`, True for a flag alone. Raises ValueError for a word that belongs to no flag."""
    flags: dict[str, Any] = {}
    name = ""  # of the flag to which the next word belongs
    for word in shlex.split(text):
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            if equals:
                flags[name] = value
                name = ""
            else:
                flags[name] = True
        elif not name:
            raise ValueError(f"{VARIABLE}={text!r} must hold flags, such as '--segment-tokens 8192'")
        elif flags[name] is True:
            flags[name] = [word]
        else:
            flags[name].append(word)
    return flags


class _Watch:
    """A finder of modules that finds none, and installs our schedules when Megatron has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MEGATRON:
            return None
        stop_watching()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            package, _, own_name = name.rpartition(".")
            setattr(sys.modules[package], own_name, module)  # as Python does next; our patches look it up
            _install()

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


def _install() -> None:
    """Raises ValueError, with the name of the variable, for what it must not hold."""
    from .bind import bind

    text = os.environ[VARIABLE]
    try:
        flags = keywords(text)
        apart = bool(flags.pop("keep_documents_apart", False))
        # A driver without a GPU may import Megatron, too; and to look for GPUs would start CUDA in it.
        bind(flags, apart, looks_for_gpu=False)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r} in the environment: {error}") from None
    _log.warning("process %d runs Megatron's steps by %s=%r", os.getpid(), VARIABLE, text)
