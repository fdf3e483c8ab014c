"""Megatron's three functions, with our interpreter in their place for every call (see workers/contract_worker.py)."""

from pathlib import Path

import pytest

from support.checks import assert_passed, checks_of
from support.launch import Job

WORKER = Path(__file__).parent / "workers" / "contract_worker.py"


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.exhaustive)], ids="{}-ranks".format)
def job(request, launch) -> tuple[Job, int]:
    """One job, which makes all checks in turn, and its number of ranks."""
    return launch(request.param, script=WORKER, timeout=240), request.param


@pytest.mark.parametrize("check", checks_of(WORKER))
def test_callers_see_what_megatrons_own_functions_show(job, check):
    finished, ranks = job
    assert_passed(finished, check, ranks)
