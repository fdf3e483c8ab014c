"""pretrain_hybrid.py trains hybrid models on segments as Megatron's own schedule does, and goes on from a GPT."""

import pytest

from support.launch import ROOT, TINY_GPT

HYBRID = ROOT / "pretrain_hybrid.py"
LAYERS, TINY = TINY_GPT[:2], TINY_GPT[2:]
PIPELINE = (*TINY, "--mock-data", "--pipeline-model-parallel-size", "2", "--position-embedding-type", "rope")
SEGMENTS = ("--sequence-splits", "4")
RECURRENT = (
    *("--hybrid-layer-pattern", "G-|*M", "--swiglu", "--disable-bias-linear"),
    *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
    *("--linear-key-head-dim", "16", "--linear-value-head-dim", "16"),
    *("--mamba-num-heads", "8", "--mamba-head-dim", "16", "--mamba-num-groups", "2", "--mamba-state-dim", "16"),
)


def test_losses_are_those_of_megatrons_own_1f1b(launch):
    own = launch(2, [*PIPELINE, *RECURRENT, "--attention-backend", "local"], script=HYBRID).check()
    ours = launch(2, [*PIPELINE, *RECURRENT, *SEGMENTS], script=HYBRID).check()
    assert len(own.losses()) == 5
    assert ours.losses() == pytest.approx(own.losses(), abs=1e-5)


def test_a_gpt_goes_on_as_a_hybrid_model_of_the_same_layers(launch, tmp_path):
    gpt = launch(2, [*LAYERS, *PIPELINE, *SEGMENTS, "--save", tmp_path, "--save-interval", "3"]).check()
    goes_on = ("--hybrid-layer-pattern", "*-*-|*-*-", "--load", tmp_path, "--ckpt-step", "3")
    hybrid = launch(2, [*PIPELINE, *goes_on, "--sequence-splits", "3"], script=HYBRID).check()
    assert hybrid.losses() == pytest.approx(gpt.losses()[3:], abs=1e-5)
