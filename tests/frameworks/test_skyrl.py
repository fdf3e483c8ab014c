"""SkyRL's Megatron worker by segments: losses, gradients, norms, log-probabilities and exported weights are those of
whole sequences.

Run by `bash scripts/frameworks.sh skyrl`, in an environment of its own. See skyrl_worker.py for what is SkyRL's.
"""

import pytest

from frameworks import skyrl_worker
from frameworks.equal_steps import require_equal_steps
from frameworks.marks import of_framework
from frameworks.policies import (
    LENGTHS,
    require_equal_gradients,
    require_equal_log_probabilities,
    require_equal_weights,
)

pytestmark = of_framework("SkyRL", "skyrl", "skyrl")


@pytest.fixture(scope="module")
def trainings(launch_with_te, tmp_path_factory):
    """Of each case on the two ranks: with segments and without. Every rank has the losses."""
    folder = tmp_path_factory.mktemp("qwen")
    results = launch_with_te.call(2, skyrl_worker.with_segments_and_without, 1700, folder=folder)
    lines = launch_with_te.last.log.count("steps are run by megatron.seq1f1b: 1f1b, segments of at most 16 tokens")
    schedules = [case.schedule for case in skyrl_worker.CASES.values()]
    assert lines == schedules.count("1f1b")
    return results


@pytest.mark.parametrize("case", skyrl_worker.CASES)
def test_steps_are_those_of_whole_sequences(trainings, case):
    require_equal_steps(trainings[1:], case, skyrl_worker.STEPS)


@pytest.mark.parametrize("case", skyrl_worker.CASES)
def test_gradients_are_those_of_whole_sequences(trainings, case):
    if skyrl_worker.CASES[case].own_sizes is None:  # else ranks have other weights
        require_equal_gradients(trainings, case)


@pytest.mark.parametrize("case", skyrl_worker.CASES)
def test_log_probabilities_are_those_of_whole_sequences(trainings, case):
    ours, own = trainings[1][case]
    assert len(own.before) == len(LENGTHS)
    require_equal_log_probabilities(ours, own)


@pytest.mark.parametrize("case", skyrl_worker.CASES)
def test_exported_weights_are_those_of_whole_sequences(trainings, case):
    ours, own = trainings[0][case]
    assert bool(own.exported) != ("lora" in case)
    require_equal_weights(ours, own)
