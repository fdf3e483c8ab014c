"""Packages that a framework imports for what no test here does: logs, another backend, a kernel of a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def empty_modules(*names: str, **contents: Any) -> Iterator[None]:
    """Within it, modules of these names can be imported, each with these `contents`; what is installed stays."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
