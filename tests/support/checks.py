"""Checks that one job of several ranks makes, each a test of its own."""

import re
from pathlib import Path

from support.launch import Job


def checks_of(worker: Path) -> list[str]:
    """The names of the functions `check_...(` of a worker that are checks of their own: they return nothing."""
    return re.findall(r"^def check_(\w+)\(.*\) -> None:$", worker.read_text(), re.MULTILINE)


def assert_passed(job: Job, check: str, ranks: int) -> None:
    """A worker prints a line for each check that a rank has passed, and ends with the first that fails."""
    passed = job.log.count(f"passed: check_{check} ")
    assert passed == ranks, f"{passed} of {ranks} ranks passed; the end of the log:\n{job.log[-6000:]}"
