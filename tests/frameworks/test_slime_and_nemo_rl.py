"""Programs in the manner of slime and NeMo-RL train by segments: losses, norms and log-probabilities are those of
Megatron's own schedule. See slime_and_nemo_rl.py for what they are like; they need no environment of their own.
"""

import pytest
import torch

from frameworks import slime_and_nemo_rl
from frameworks.equal_steps import require_equal_steps, with_losses

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def trainings(launch):
    """Of each program on the two ranks: with segments and without."""
    results = launch.call(2, slime_and_nemo_rl.with_segments_and_without, 300)
    assert launch.last.log.count("steps are run by megatron.seq1f1b: 1f1b, segments of at most 16 tokens") == 2
    return results


@pytest.mark.parametrize("program", slime_and_nemo_rl.PROGRAMS)
def test_steps_are_those_of_whole_sequences(trainings, program):
    require_equal_steps(trainings, program, slime_and_nemo_rl.STEPS)


@pytest.mark.parametrize("program", slime_and_nemo_rl.PROGRAMS)
def test_activations_take_less(trainings, program):
    ours, own = trainings[0][program]
    assert ours.peak_bytes < own.peak_bytes


def test_log_probabilities_are_those_of_whole_sequences(trainings):
    ours, own = with_losses(trainings, "slime")
    assert len(own.log_probs) == slime_and_nemo_rl.NUM_ROLLOUTS
    torch.testing.assert_close(ours.log_probs, own.log_probs, rtol=1e-5, atol=1e-5)
