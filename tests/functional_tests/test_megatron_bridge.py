"""Models of Hugging Face's in Megatron-Bridge: they run and train by segments (see bridge_worker.py)."""

import os
import re

import pytest

from support.launch import ROOT, Job, torchrun

WORKER = ROOT / "tests" / "functional_tests" / "workers" / "bridge_worker.py"
# Made by hand, see docs/hugging-face.md; its transformers is not the one of the other tests.
BRIDGE = ROOT / ".venv" / "megatron-bridge"
# Made by scripts/setup.sh; what Megatron-Bridge imports.
TRANSFORMER_ENGINE = ROOT / ".venv" / "transformer-engine"


def run(*arguments: object) -> Job:
    """On two ranks, with Megatron-Bridge."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", BRIDGE, TRANSFORMER_ENGINE)))
    env = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    return torchrun(WORKER, 2, arguments, timeout=300, env=env).check()


def needs(*packages: str) -> None:
    """Skip a test unless these are where Megatron-Bridge is, and Transformer Engine where it belongs."""
    places = [*((BRIDGE, package) for package in packages), (TRANSFORMER_ENGINE, "transformer_engine")]
    for folder, package in places:
        if not (folder / package).is_dir():
            pytest.skip(f"{package} is not in {folder.relative_to(ROOT)}: see docs/hugging-face.md")


def assert_logits_agree(log: str) -> None:
    assert float(re.search(r"differ by at most (\S+)", log)[1]) < 1e-4


def test_a_llama_goes_in_and_comes_back(tmp_path):
    needs("megatron/bridge")
    log = run(tmp_path, 3).log
    assert_logits_agree(log)
    assert len(re.findall(r"rank [01]: 39 weights came back", log)) == 2


def test_its_own_loop_trains_by_segments_and_saves_the_model(tmp_path):
    needs("megatron/bridge", "modelopt")
    by_segments = run(tmp_path, 4, "train")
    assert_logits_agree(by_segments.log)
    whole = run(tmp_path, 1, "train")
    assert len(whole.losses()) == 5 and whole.losses()[-1] < whole.losses()[0] - 0.5
    assert by_segments.losses() == pytest.approx(whole.losses(), abs=1e-5)
    evaluated = whole.losses("lm loss value")
    assert len(evaluated) >= 3  # after two iterations, after four, and at the end
    assert by_segments.losses("lm loss value") == pytest.approx(evaluated, abs=1e-5)
