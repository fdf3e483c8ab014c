"""Our executor in programs other than megatron.training, and in place of Megatron's three functions (see workers/)."""

from pathlib import Path

import pytest

from support.checks import assert_passed, checks_of

EXECUTOR, CONTRACT, MEMORY = (
    Path(__file__).parent / "workers" / f"{name}_worker.py" for name in ("executor", "contract", "memory")
)


@pytest.fixture(scope="module")
def executor_job(launch):
    """One job on two ranks, which makes all checks in turn."""
    return launch(2, script=EXECUTOR)


@pytest.mark.parametrize("check", checks_of(EXECUTOR))
def test_callers_can_rely_on(executor_job, check):
    assert_passed(executor_job, check, ranks=2)


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.exhaustive)], ids="{}-ranks".format)
def contract_job(request, launch):
    return launch(request.param, script=CONTRACT, timeout=240), request.param


@pytest.mark.parametrize("check", checks_of(CONTRACT))
def test_callers_see_what_megatrons_own_functions_show(contract_job, check):
    assert_passed(contract_job[0], check, ranks=contract_job[1])


@pytest.mark.parametrize("flag, place", [("--fail", "1 failed at 1F1.0"), ("--stuck", "0 failed at 0F3.0")])
def test_a_failing_rank_ends_its_job_and_names_its_action(launch, flag, place):
    """Also where it has sent a message that nobody takes."""
    job = launch(2, [flag], script=EXECUTOR, timeout=60)
    assert job.code == 1  # the rank's own: a job whose time is up is killed
    assert f"pipeline rank {place}, among" in job.log


def test_the_peak_is_units_in_flight_and_their_keys_and_values(launch):
    """What Seq1F1B saves: a step holds at its peak what the formula gives."""
    job = launch(4, script=MEMORY, timeout=200).check()
    assert job.log.count("promised") == 4 * 5
