"""Which names of megatron-core we rely on, and which of them another version has changed."""

import json
import shutil
import subprocess
import sys

import pytest

import upstream_names
from support.files import write_files

# Beside the pinned version: the others that are supported, and the newest of all, candidates for a release included.
VERSIONS = ["==0.19.0", "==0.19.1", ""]


def test_the_installed_version_has_every_name_as_recorded():
    installed, recorded = upstream_names.installed(), json.loads(upstream_names.RECORD.read_text())
    assert upstream_names.changes(installed) == [] and len(recorded) > 150
    assert upstream_names.signatures(installed) == recorded, "run tools/upstream_names.py --write"
    # A patched method whose name is put together from two strings.
    assert "megatron.core.tensor_parallel.layers.ColumnParallelLinear._forward_impl" in recorded
    signature = upstream_names.Upstream(installed).signature
    assert signature("megatron.core.parallel_state.get_pipeline_model_parallel_group").startswith("(")


def test_what_changed_is_named_with_the_files_that_use_it(tmp_path):
    """A version that lost a function, renamed a parameter of another, and moved a third."""
    files = {
        "schedules.py": "from .elsewhere import get_forward_backward_func\ndef forward_step(renamed): ...\n",
        "elsewhere.py": "def get_forward_backward_func(pp_size=None, vp_size=None, schedule_pg_collection=None): ...\n",
    }
    write_files(tmp_path / "megatron" / "core" / "pipeline_parallel", files)
    lines = {line.split()[0]: line for line in upstream_names.changes(tmp_path)}
    module = "megatron.core.pipeline_parallel.schedules"
    assert f"{module}.get_forward_backward_func" not in lines
    assert "is (renamed): megatron/seq1f1b/" in lines[f"{module}.forward_step"]
    assert "is gone: megatron/seq1f1b/" in lines[f"{module}.backward_step"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version or "newest")
def test_another_version_has_every_name(version, tmp_path):
    uv = shutil.which("uv") or shutil.which(upstream_names.ROOT / ".uv" / "bin" / "uv")
    if uv is None:
        pytest.skip("uv is not installed")
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--prerelease", "allow", "--python", sys.executable]
    run = subprocess.run([*install, "--target", tmp_path, f"megatron-core{version}"], capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"it cannot be fetched: {run.stderr[-300:]}")
    assert upstream_names.changes(tmp_path) == []
