"""Our executor in the hands of programs other than megatron.training (see executor_worker.py)."""

import re
from pathlib import Path

WORKER = Path(__file__).parent / "workers" / "executor_worker.py"


def test_what_callers_rely_on(launch):
    log = launch(2, script=WORKER).check().log
    for check in re.findall(r"def (check_\w+)", WORKER.read_text()):
        assert log.count(f"passed: {check} ") == 2


def test_a_rank_that_fails_ends_its_job_at_once_with_the_place_in_the_schedule(launch):
    job = launch(2, ["--fail"], script=WORKER, timeout=100)
    assert job.code == 1  # the rank's own: a job whose time is up is killed
    assert "pipeline rank 1 failed at 1F1.0, among" in job.log


def test_a_rank_that_fails_does_not_wait_for_messages_that_nobody_takes(launch):
    job = launch(2, ["--stuck"], script=WORKER, timeout=60)
    assert job.code == 1
    assert "pipeline rank 0 failed at 0F3.0, among" in job.log
