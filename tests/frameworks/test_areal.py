"""AReaL's Megatron engines by segments: losses, gradients, norms, log-probabilities and saved weights are those of
whole sequences.

Run by `bash scripts/frameworks.sh areal`, in an environment of its own. See areal_engine.py for what is AReaL's.
"""

import pytest

from frameworks import areal_engine
from frameworks.equal_steps import require_equal_steps
from frameworks.marks import of_framework
from frameworks.policies import require_equal_gradients, require_equal_log_probabilities, require_equal_weights

pytestmark = of_framework("AReaL", "areal", "areal")


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
    require_equal_log_probabilities(ours, own)


@pytest.mark.parametrize("case", areal_engine.CASES)
def test_saved_weights_are_those_of_whole_sequences(trainings, case):
    ours, own = trainings[0][case]
    require_equal_weights(ours, own)
