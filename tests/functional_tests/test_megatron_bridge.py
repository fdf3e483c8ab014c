"""Weights of Hugging Face's by Megatron-Bridge: into a model that runs by segments, and back (see bridge_worker.py)."""

import os
import re

import pytest

from functional_tests.launch import ROOT, torchrun

WORKER = ROOT / "tests" / "functional_tests" / "bridge_worker.py"
# Made by hand, see docs/hugging-face.md; its transformers is not the one of the other tests.
BRIDGE = ROOT / ".venv" / "megatron-bridge"
# Made by scripts/setup.sh; what Megatron-Bridge imports.
TRANSFORMER_ENGINE = ROOT / ".venv" / "transformer-engine"


def test_a_llama_goes_in_and_comes_back(tmp_path):
    for folder, package in ((BRIDGE, "megatron/bridge"), (TRANSFORMER_ENGINE, "transformer_engine")):
        if not (folder / package).is_dir():
            pytest.skip(f"{package} is not in {folder.relative_to(ROOT)}: see docs/hugging-face.md")
    paths = os.pathsep.join(map(str, (ROOT, BRIDGE, TRANSFORMER_ENGINE)))
    log = torchrun(WORKER, 2, [tmp_path], timeout=300, env={"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}).check().log
    assert float(re.search(r"differ by at most (\S+)", log)[1]) < 1e-4
    assert len(re.findall(r"rank [01]: 39 weights came back", log)) == 2
