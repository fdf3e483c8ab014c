"""--pipeline-placement v trains the model that looped chunks train, and their checkpoints are interchangeable."""

import pytest

from support.launch import TINY_GPT

CHUNKS = (*TINY_GPT, "--mock-data", "--pipeline-model-parallel-size", "2")
LOOPED = ("--num-virtual-stages-per-pipeline-rank", "2", "--pipeline-schedule", "1f1b", "--sequence-splits", "2")
AUTO = ("--pipeline-placement", "v", "--pipeline-schedule", "auto", "--sequence-splits", "3")
V = ("--num-virtual-stages-per-pipeline-rank", "2", *AUTO)
LAID_OUT = ("--pipeline-model-parallel-layout", "E|t|ttt|L", *AUTO)


def test_losses_equal_those_of_looped_chunks(launch, tmp_path):
    """The embedding is tied to the output layer, which is on the same rank in a V."""
    looped, laid_out = tmp_path / "looped", tmp_path / "laid out"
    evaluation = ("--eval-interval", "5", "--eval-iters", "2")
    saved = launch(2, [*CHUNKS, *LOOPED, "--save", looped, "--save-interval", "3", *evaluation]).check()
    expected, expected_evaluation = saved.losses(), saved.losses("lm loss value")
    assert len(expected) == 5 and expected_evaluation

    at_3 = ("--load", looped, "--ckpt-step", "3")
    in_a_v = launch(2, [*CHUNKS, *V, *at_3, *evaluation]).check()
    assert in_a_v.losses() == pytest.approx(expected[3:], abs=1e-5)
    assert in_a_v.losses("lm loss value") == pytest.approx(expected_evaluation, abs=1e-5)

    saves = ("--save", laid_out, "--save-interval", "4", "--exit-interval", "4")
    in_a_layout = launch(2, [*CHUNKS, *LAID_OUT, *at_3, *saves]).check()
    assert in_a_layout.losses() == pytest.approx(expected[3:4], abs=1e-5)

    again = launch(2, [*CHUNKS, *LOOPED, "--load", laid_out]).check()
    assert again.losses() == pytest.approx(expected[4:], abs=1e-5)
