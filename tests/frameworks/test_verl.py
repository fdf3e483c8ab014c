"""verl's Megatron engine by segments: losses, gradient norms and log-probabilities are those of whole sequences.

Run by `bash scripts/frameworks.sh verl`, in an environment of its own. See verl_engine.py for what is verl's.
"""

from importlib.util import find_spec

import pytest
import torch

from frameworks import verl_engine
from frameworks.equal_steps import require_equal_steps, with_losses
from support.launch import ROOT

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed here: bash scripts/frameworks.sh verl"),
]


@pytest.fixture(scope="module")
def trainings(launch, tmp_path_factory):
    """Of each case on the two ranks: with segments and without."""
    results = launch.call(2, verl_engine.with_segments_and_without, 900, folder=tmp_path_factory.mktemp("qwen"))
    steps = "steps are run by megatron.seq1f1b: 1f1b, segments of at most 16 tokens"
    assert launch.last.log.count(steps) == len(verl_engine.CASES)
    return results


@pytest.mark.parametrize("case", verl_engine.CASES)
def test_steps_are_those_of_whole_sequences(trainings, case):
    require_equal_steps(trainings, case, verl_engine.STEPS)


@pytest.mark.parametrize("case", verl_engine.CASES)
def test_log_probabilities_are_those_of_whole_sequences(trainings, case):
    ours, own = with_losses(trainings, case)
    names = {"values"} if "critic" in case else {"log_probs", "entropy"}
    for mine, others in ((ours.before, own.before), (ours.after, own.after)):
        assert mine.keys() == others.keys() == names
        for name in names:
            torch.testing.assert_close(mine[name], others[name], rtol=1e-5, atol=1e-5)


def test_segments_beside_megatrons_own_schedule(launch):
    small = "--rollouts 4 --median 32 --longest 256 --micro-batch-tokens 256 --segment-tokens 64 --hidden-size 32"
    flags = [*small.split(), "--repeats", "1"]
    log = launch(2, flags, script=ROOT / "tools" / "benchmark_posttraining.py", timeout=300).check().log
    *_, own, ours = log.splitlines()
    assert own.startswith("Megatron's own ") and ours.startswith("segments of 64 ")
    # The peaks of both ranks, in MB.
    assert all(float(number) > 0 for row in (own, ours) for number in row.split()[-2:])
