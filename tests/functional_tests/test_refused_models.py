"""Models that show only when they are built that their sequences cannot be cut."""

from pathlib import Path

import pytest

from support.launch import ROOT, TINY_GPT

OVERLAY = ROOT / "megatron" / "seq1f1b" / "__main__.py"
SCRIPT = Path(__file__).parent / "scripts" / "vision_script.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_vision_tower_ends_the_first_step_with_a_sentence(launch, ranks):
    flags = [*TINY_GPT, "--mock-data", "--eval-interval", 9, "--pipeline-model-parallel-size", ranks]
    flags += ["--sequence-splits", 4]
    job = launch(ranks, [SCRIPT, *flags], script=OVERLAY)
    last = job.log.splitlines()[-1]
    assert job.code == 2 and "Traceback" not in job.log, job.log[-4000:]
    assert last.startswith("error: ") and "vision_model.layers.0.self_attention is a SelfAttention" in last
    assert "whose tokens need later ones (an encoder, a vision tower)" in last and "drop --sequence-splits" in last
