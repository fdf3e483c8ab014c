"""pretrain_hybrid.py trains hybrid models on segments as Megatron's own schedule does."""

import pytest

from support.launch import ROOT, TINY_GPT

HYBRID = ROOT / "pretrain_hybrid.py"
PIPELINE = (*TINY_GPT[2:], "--mock-data", "--pipeline-model-parallel-size", "2", "--position-embedding-type", "rope")
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
