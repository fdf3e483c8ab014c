"""Checks that one job of several ranks makes, each a test of its own; and matrices of which a few cases are functional
tests, and the rest exhaustive ones."""

import re
from collections.abc import Container, Iterable
from pathlib import Path

import pytest

from support.launch import Job


def checks_of(worker: Path) -> list[str]:
    """The names of the functions `check_...(` of a worker that are checks of their own: they return nothing."""
    return re.findall(r"^def check_(\w+)\(.*\) -> None:$", worker.read_text(), re.MULTILINE)


def assert_passed(job: Job, check: str, ranks: int) -> None:
    """A worker prints a line for each check that a rank has passed, and ends with the first that fails."""
    passed = job.log.count(f"passed: check_{check} ")
    assert passed == ranks, f"{passed} of {ranks} ranks passed; the end of the log:\n{job.log[-6000:]}"


def few_of(names: Iterable[str], few: Container[str]) -> list:
    """Parameters by name; those that are not among the `few` are marked."""
    return [pytest.param(name, id=name, marks=() if name in few else pytest.mark.exhaustive) for name in names]
