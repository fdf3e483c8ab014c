"""Transformer Engine's layers by segments, and their weight gradients apart, against Megatron's own unsegmented run.

Its Python runs on CPU tensors, on stand-ins of its kernels (see megatron/seq1f1b/cpu/transformer_engine).
"""

import re

import pytest

from functional_tests.equality.suites import groups, representatives
from functional_tests.launch import ROOT, torchrun

WORKER = ROOT / "tests" / "functional_tests" / "equality" / "worker.py"
# Made by scripts/setup.sh, away from other packages.
PACKAGES = ROOT / ".venv" / "transformer-engine"
CASES = [name for group in groups() if group.model.transformer_engine for name in group.cases]
FEW = representatives()


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """The line on every selected case, of one job on two ranks."""
    if not (PACKAGES / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {PACKAGES.relative_to(ROOT)}: run scripts/setup.sh")
    selected = tmp_path_factory.mktemp("transformer_engine") / "cases"
    items = [item for item in request.session.items if item.originalname == test_its_layers_train_by_segments.__name__]
    selected.write_text("\n".join(item.callspec.params["case"] for item in items))
    folders = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests:{PACKAGES}"}
    job = torchrun(WORKER, 2, [selected, "--transformer-engine"], timeout=300, env=folders)
    return dict(re.findall(r"^case (\S+): (.*)$", job.check().log, re.MULTILINE))


def test_grouped_products_have_weight_gradients_apart_and_names_of_checkpoints_stay():
    if not (PACKAGES / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {PACKAGES.relative_to(ROOT)}: run scripts/setup.sh")
    folders = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests:{PACKAGES}"}
    job = torchrun(WORKER.parents[1] / "transformer_engine_worker.py", 1, timeout=200, env=folders)
    assert "equal\n" in job.check().log


@pytest.mark.parametrize(
    "case", [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_its_layers_train_by_segments(verdicts, case):
    assert verdicts[case].startswith("equal, "), verdicts[case]
