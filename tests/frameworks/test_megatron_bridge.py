"""Megatron-Bridge trains by segments: its losses, gradient norms and exported weights are those of whole sequences.

Run by `bash scripts/frameworks.sh megatron-bridge`, in an environment of its own. See bridge_training.py for what is
Megatron-Bridge's.
"""

import pytest
import torch

from frameworks import bridge_training
from frameworks.equal_steps import require_equal_steps
from frameworks.marks import of_framework

pytestmark = of_framework("Megatron-Bridge", "megatron-bridge", "megatron.bridge")


@pytest.fixture(scope="module")
def trainings(launch_with_te, tmp_path_factory):
    """Of each case on the two ranks: with segments and without."""
    folder = tmp_path_factory.mktemp("trainings")
    return launch_with_te.call(2, bridge_training.with_segments_and_without, 1700, folder=folder)


def test_a_llama_goes_in_and_comes_back(launch_with_te, tmp_path):
    assert launch_with_te.call(2, bridge_training.go_in_and_come_back, 600, folder=tmp_path) == [39, 39]


@pytest.mark.parametrize("case", bridge_training.CASES)
def test_steps_are_those_of_whole_sequences(trainings, case):
    require_equal_steps(trainings, case, bridge_training.STEPS)
    _, own = trainings[1][case]
    assert own.losses[-1] < own.losses[0]


@pytest.mark.parametrize("case", bridge_training.CASES)
def test_evaluations_are_those_of_whole_sequences(trainings, case):
    ours, own = trainings[1][case]
    assert len(own.evaluated) >= 1
    assert ours.evaluated == pytest.approx(own.evaluated, rel=1e-5)


@pytest.mark.parametrize("case", bridge_training.CASES)
def test_exported_weights_are_those_of_whole_sequences(trainings, case):
    ours, own = trainings[0][case]
    assert len(own.exported) == 39
    assert ours.exported.keys() == own.exported.keys()
    for name, weight in ours.exported.items():
        torch.testing.assert_close(weight, own.exported[name], rtol=1e-5, atol=1e-5)
