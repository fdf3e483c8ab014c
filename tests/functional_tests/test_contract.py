"""Megatron's three functions, with our interpreter in their place for every call (see contract_worker.py)."""

import re
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "contract_worker.py"


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_callers_see_what_megatrons_own_functions_show_them(launch, ranks):
    log = launch(ranks, script=WORKER, timeout=240).check().log
    for check in set(re.findall(r"def (check_\w+)", WORKER.read_text())) - {"check_same"}:
        assert log.count(f"passed: {check} ") == ranks
