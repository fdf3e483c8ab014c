"""Our executor in programs other than megatron.training (see workers/executor_worker.py)."""

from pathlib import Path

import pytest

from support.checks import assert_passed, checks_of
from support.launch import Job

WORKER = Path(__file__).parent / "workers" / "executor_worker.py"


@pytest.fixture(scope="module")
def job(launch) -> Job:
    """One job on two ranks, which makes all checks in turn."""
    return launch(2, script=WORKER)


@pytest.mark.parametrize("check", checks_of(WORKER))
def test_callers_can_rely_on(job, check):
    assert_passed(job, check, ranks=2)


def test_a_failing_rank_ends_its_job_and_names_its_action(launch):
    job = launch(2, ["--fail"], script=WORKER, timeout=100)
    assert job.code == 1  # the rank's own: a job whose time is up is killed
    assert "pipeline rank 1 failed at 1F1.0, among" in job.log


def test_a_failing_rank_waits_for_no_message_nobody_takes(launch):
    job = launch(2, ["--stuck"], script=WORKER, timeout=60)
    assert job.code == 1
    assert "pipeline rank 0 failed at 0F3.0, among" in job.log
