"""Transformer Engine's layers by segments, and their weight gradients apart, against Megatron's own unsegmented run.

Its Python runs on CPU tensors, on a double of its kernels (see support/te_double.py).
"""

import pytest

from functional_tests.equality import layout
from functional_tests.equality.cases import Layout
from functional_tests.equality.comparison import run_cases, verdicts_in
from functional_tests.equality.models import Model
from functional_tests.equality.suites import groups, representatives
from megatron.seq1f1b.model import use_segment_attention
from megatron.seq1f1b.schedule import Placement, Shape, build, write_csv
from support.launch import ITERATIONS, ROOT, TINY_GPT, Launcher
from support.on_ranks import few_of, on_ranks

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
def verdicts(request, launch):
    """The line on every selected case, of one job on two ranks."""
    items = [item for item in request.session.items if item.originalname == test_its_layers_train_by_segments.__name__]
    launch.call(2, run_cases, timeout=300, names={item.callspec.params["case"] for item in items})
    return verdicts_in(launch.last.log)


@on_ranks(1)
def test_a_checkpoint_keeps_its_names():
    """All but that of its own fp8 state, which holds nothing without fp8."""
    chunks = layout.build(Model(transformer_engine="unfused"), Layout())
    before = chunks[0].state_dict()
    use_segment_attention(chunks)
    gone = before.keys() - chunks[0].state_dict().keys()
    assert chunks[0].state_dict().keys() <= before.keys()
    assert gone and all(name.endswith(".core_attention._extra_state") for name in gone), gone
    assert all(before[name] is None or before[name].numel() == 0 for name in gone)


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
