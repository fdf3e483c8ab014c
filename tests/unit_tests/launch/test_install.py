"""How a program installs the package, and what it is called."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import megatron.seq1f1b
from megatron.seq1f1b.launch.install import install, pipeline_config

ROOT = Path(__file__).resolve().parents[3]


def test_a_wrong_keyword_of_a_program_is_one_sentence():
    with pytest.raises(ValueError, match="^unrecognized arguments: --sequence-split 2 .did you mean --sequence-splits"):
        install(sequence_split=2)


def test_a_configuration_before_install_is_one_sentence():
    with pytest.raises(ValueError, match=r"^the script must call megatron\.seq1f1b\.install before"):
        pipeline_config()


def test_all_that_is_imported_is_declared():
    """But what a user of `pip install -e .` has: PyTorch and Megatron. Imports within functions are of extras."""
    trees = [ast.parse(path.read_text()) for path in Path(megatron.seq1f1b.__file__).parent.rglob("*.py")]
    imports = [node for tree in trees for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name for node in imports if isinstance(node, ast.Import) for name in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and not node.level}
    imported = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"torch", "megatron"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert imported <= {*project["dependencies"]}, imported
    assert "greenlet" in imported


def test_the_version_is_that_of_the_newest_release():
    newest = re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest[1] == cited[1] == megatron.seq1f1b.__version__
