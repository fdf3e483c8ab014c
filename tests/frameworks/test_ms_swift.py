"""ms-swift trains by segments: losses, norms and evaluations are those of whole packs, also after a resumption.

Run by `bash scripts/frameworks.sh ms-swift`, in an environment of its own. See swift_training.py for what is
ms-swift's.
"""

import pytest

from frameworks import swift_training
from frameworks.equal_steps import require_equal_steps
from frameworks.marks import of_framework

pytestmark = of_framework("ms-swift", "ms-swift", "mcore_bridge")


@pytest.fixture(scope="module")
def trainings(launch_with_te, tmp_path_factory):
    """Of each case on the two ranks: with segments and without."""
    folder = tmp_path_factory.mktemp("trainings")
    results = launch_with_te.call(2, swift_training.with_segments_and_without, 1700, folder=folder)
    assert "steps are run by megatron.seq1f1b: 1f1b, segments of at most 16 tokens" in launch_with_te.last.log
    return results


@pytest.mark.parametrize("case", swift_training.CASES)
def test_steps_are_those_of_whole_sequences(trainings, case):
    is_grpo = case.startswith("grpo")  # the loss of which is a sum over answers, better and worse ones than the mean
    require_equal_steps(trainings, case, swift_training.STEPS, of_zero=1e-6 if is_grpo else 0.0)
    _, own = trainings[1][case]
    if case != "kto" and not is_grpo:  # whose losses depend on how many answers of a step are good ones
        assert own.losses[-1] < own.losses[0]


@pytest.mark.parametrize("case", swift_training.CASES)
def test_evaluations_are_those_of_whole_sequences(trainings, case):
    ours, own = trainings[1][case]
    assert len(own.evaluated) == 1
    assert ours.evaluated == pytest.approx(own.evaluated, rel=1e-5)


@pytest.fixture(scope="module")
def resumed(launch_with_te, tmp_path_factory):
    """Of each case on the last rank: a whole training, and one that was stopped and resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    return launch_with_te.call(2, swift_training.stopped_and_resumed, 1700, folder=folder)[1]


@pytest.mark.parametrize("case", swift_training.RESUMED)
def test_a_stopped_training_goes_on(resumed, case):
    trainings = resumed[case]
    whole = trainings.whole
    parts = trainings.stopped, trainings.resumed
    assert [len(part.losses) for part in parts] == [swift_training.STOPS_AFTER, 2]
    assert [loss for part in parts for loss in part.losses] == whole.losses
    assert [norm for part in parts for norm in part.norms] == whole.norms
    assert trainings.resumed.evaluated == whole.evaluated
