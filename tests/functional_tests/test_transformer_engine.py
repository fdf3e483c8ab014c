"""Transformer Engine's layers by segments, and their weight gradients apart, against Megatron's own unsegmented run.

Its Python runs on CPU tensors, on a double of its kernels (see support/te_double.py).
"""

import re
from pathlib import Path

import pytest

from functional_tests.equality.suites import groups, representatives
from megatron.seq1f1b.schedule import Placement, Shape, build, write_csv
from support.checks import few_of
from support.launch import ITERATIONS, ROOT, TINY_GPT, Launcher

FOLDER = Path(__file__).parent
# Made by scripts/setup.sh, away from other packages.
PACKAGES = ROOT / ".venv" / "transformer-engine"
CASES = [name for group in groups() if group.model.transformer_engine for name in group.cases]
FEW = representatives()


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Ranks that find Transformer Engine."""
    if not (PACKAGES / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {PACKAGES.relative_to(ROOT)}: run scripts/setup.sh")
    launcher = Launcher(tmp_path_factory.mktemp("logs"), [PACKAGES])
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def verdicts(request, launch, tmp_path_factory):
    """The line on every selected case, of one job on two ranks."""
    selected = tmp_path_factory.mktemp("transformer_engine") / "cases"
    items = [item for item in request.session.items if item.originalname == test_its_layers_train_by_segments.__name__]
    selected.write_text("\n".join(item.callspec.params["case"] for item in items))
    job = launch(2, [selected], FOLDER / "equality" / "worker.py", timeout=300)
    return dict(re.findall(r"^case (\S+): (.*)$", job.check().log, re.MULTILINE))


def test_a_checkpoint_keeps_its_names(launch):
    job = launch(1, script=FOLDER / "workers" / "transformer_engine_worker.py", timeout=200)
    assert "equal\n" in job.check().log


TRAINING = (*TINY_GPT, "--mock-data", "--transformer-impl", "transformer_engine", "--pipeline-model-parallel-size", "2")


def test_segments_train_as_whole_sequences_under_megatron(launch, tmp_path):
    """Its own attention runs on GPUs only; ours takes its place without segments, too."""
    whole = launch(2, [*TRAINING]).check().losses()
    assert len(whole) == ITERATIONS
    segments = launch(2, [*TRAINING, "--sequence-splits", "4"]).check().losses()
    assert segments == pytest.approx(whole, abs=1e-5)
    write_csv(build("zb-h1", Shape(Placement(2), 4, 2)), tmp_path / "mine.csv")
    flags = "--pipeline-schedule-file", str(tmp_path / "mine.csv"), "--sequence-splits", "2"
    with_weight_gradients_apart = launch(2, [*TRAINING, *flags]).check().losses()
    assert with_weight_gradients_apart == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("case", few_of(CASES, FEW))
def test_its_layers_train_by_segments(verdicts, case):
    assert verdicts[case].startswith("equal, "), verdicts[case]
