"""How tests start other processes."""

import os
from pathlib import Path

from support.launch import python_path


def test_processes_find_what_this_one_finds(monkeypatch):
    """Also Megatron, where it was installed into a folder of its own."""
    first = Path("first")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert python_path(first) == "first"
    monkeypatch.setenv("PYTHONPATH", "target")
    assert python_path(first, Path("second")).split(os.pathsep) == ["first", "second", "target"]
