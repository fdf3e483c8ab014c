"""AReaL's Megatron engines by segments: losses, gradients, norms, log-probabilities and saved weights are those of
whole sequences.

Run by `bash scripts/frameworks.sh areal`, in an environment of its own. See areal_engine.py for what is AReaL's.
"""

from importlib.util import find_spec

import pytest
import torch

from frameworks import areal_engine
from frameworks.equal_steps import require_equal_gradients, require_equal_steps

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        find_spec("areal") is None, reason="AReaL is not installed here: bash scripts/frameworks.sh areal"
    ),
]


@pytest.fixture(scope="module")
def trainings(launch_with_te, tmp_path_factory):
    """Of each case on the two ranks: with segments and without."""
    folder = tmp_path_factory.mktemp("qwen")
    return launch_with_te.call(2, areal_engine.with_segments_and_without, 1700, folder=folder)


@pytest.mark.parametrize("case", areal_engine.CASES)
def test_steps_are_those_of_whole_sequences(trainings, case):
    if areal_engine.CASES[case].own_sizes is None:
        require_equal_steps(trainings[1:], case, areal_engine.STEPS)
    else:  # a context-parallel rank has a share of the loss
        ours, own = trainings[1][case]
        assert len(own.norms) == areal_engine.STEPS
        assert ours.norms == pytest.approx(own.norms, rel=1e-5)


@pytest.mark.parametrize("case", areal_engine.CASES)
def test_gradients_are_those_of_whole_sequences(trainings, case):
    if areal_engine.CASES[case].own_sizes is None:  # else ranks have other weights
        require_equal_gradients(trainings, case)


@pytest.mark.parametrize("case", areal_engine.CASES)
def test_log_probabilities_are_those_of_whole_sequences(trainings, case):
    ours, own = trainings[1][case]
    assert len(own.before) == len(own.after)
    torch.testing.assert_close(ours.before, own.before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.after, own.after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", areal_engine.CASES)
def test_saved_weights_are_those_of_whole_sequences(trainings, case):
    ours, own = trainings[0][case]
    torch.testing.assert_close(ours.exported, own.exported, rtol=1e-5, atol=1e-6)
