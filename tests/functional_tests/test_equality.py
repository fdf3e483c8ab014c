"""Every schedule gives the losses and gradients of Megatron's own unsegmented run (see equality_worker.py)."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("equality_worker.py")
RANKS = {
    "pp1": 1,
    "pp2": 2,
    "pp4": 4,
    "pp2-families": 2,
    "pp2-chunks3": 2,
    "pp4-chunks2": 4,
    "pp2-split": 2,
    "pp4-split": 4,
    "pp2-tp2-split": 4,
    "tp2": 2,
    "pp2-tp2": 4,
    "pp2-documents": 2,
    "pp2-tp2-documents": 4,
    "pp2-positions": 2,
    "pp2-mla": 2,
    "tp2-mla": 2,
    "pp2-moe": 2,
    "pp2-moe-losses": 2,
    "pp2-mla-moe": 2,
    "pp1-moe-global": 1,
    "dp2-moe": 2,
    "pp2-dp2-moe": 4,
    "tp2-moe": 2,
    "dp2": 2,
    "pp2-dp2": 4,
    "pp2-dp2-overlap": 4,
    "pp2-v": 2,
    "pp4-v": 4,
    "pp2-dp2-v": 4,
}


@pytest.mark.parametrize("suite", RANKS)
def test_step_equals_megatrons_own_unsegmented_run(launch, suite):
    job = launch(RANKS[suite], ["--suite", suite], script=WORKER, timeout=300).check()
    assert "equal: " in job.log
