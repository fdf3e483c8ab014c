"""Which versions of Megatron are taken, and what the package is called."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from megatron.core import package_info

import megatron.seq1f1b
from megatron.seq1f1b.install import check_version, install
from support.patience import patient

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["0.18.2", "0.9.0rc1"])
def test_an_older_megatron_is_one_sentence(version):
    with pytest.raises(ImportError, match=f"needs megatron-core 0.19 and found {version}; it is tested with 0.19.0, "):
        check_version(version)


@pytest.mark.parametrize(
    "version, lines", [("0.20.0rc0", 1), ("1.0.0", 1), ("0.19.3", 1), (package_info.__version__.split("+")[0], 0)]
)
def test_a_megatron_that_nobody_has_tried_is_one_warning(caplog, version, lines):
    check_version(version)
    assert caplog.text.count(f"megatron-core {version} was never tried with megatron.seq1f1b") == lines
    assert len(caplog.records) == lines


def test_a_wrong_keyword_of_a_program_is_one_sentence():
    with pytest.raises(ValueError, match="^unrecognized arguments: --sequence-split 2 .did you mean --sequence-splits"):
        install(sequence_split=2)


def test_on_a_cpu_the_imports_of_megatron_are_silent():
    """What it lacks of packages for GPUs is nothing that the user of a machine without one can act on."""
    program = "from megatron.seq1f1b import install; install(sequence_splits=2, device='cpu'); import megatron.training"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(300))
    assert run.returncode == 0
    assert not [line for line in run.stderr.splitlines() if "Warning" in line or "CUDA_HOME" in line], run.stderr


def test_the_package_has_the_version_of_its_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert megatron.seq1f1b.__version__ == project["version"]
