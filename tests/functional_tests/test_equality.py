"""Every schedule gives the losses and gradients of Megatron's own unsegmented run (see equality/comparison.py).

Each case has an id of its own, suite/group/step: `-k pp2-moe`, `-k zb-h1-k3`. All selected cases with the same number
of ranks run in one job; if it dies, the case that was running has failed and another job goes on with the next.
"""

from contextlib import suppress

import pytest

from functional_tests.equality.comparison import run_cases, verdicts_in
from functional_tests.equality.suites import groups, representatives
from support.on_ranks import few_of

GROUPS = [group for group in groups() if group.model.transformer_engine is None]
CASES = {name: group.ranks for group in GROUPS for name in group.cases}
FEW = representatives() & CASES.keys()


class Verdicts:
    """The verdict on every selected case; those with the same number of ranks, and of the same tier, share a job."""

    def __init__(self, launch, selected: set[str]) -> None:
        self._launch, self._selected = launch, selected
        self._found: dict[str, str] = {}

    def of(self, name: str) -> str:
        if name not in self._found:
            self._run([case for case in CASES if case in self._selected and shares_job(case, name)])
        return self._found[name]

    def _run(self, names: list[str]) -> None:
        """Run the cases in as many jobs as it takes."""
        while names:
            with suppress(AssertionError):
                self._launch.call(CASES[names[0]], run_cases, timeout=300 + 20 * len(names), names=names)
            done = verdicts_in(self._launch.last.log)
            self._found |= done
            names = [name for name in names if name not in done]
            if names:
                self._found[names[0]] = f"the job ended, {self._launch.last.log[-6000:]}"
                names = names[1:]


def shares_job(case: str, other: str) -> bool:
    return CASES[case] == CASES[other] and (case in FEW) == (other in FEW)


@pytest.fixture(scope="session")
def verdicts(request, launch) -> Verdicts:
    items = [item for item in request.session.items if item.originalname == test_a_step.__name__]
    return Verdicts(launch, {item.callspec.params["case"] for item in items})


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", few_of(CASES, FEW))
def test_a_step(verdicts, case):
    verdict = verdicts.of(case)
    assert verdict.startswith("equal, "), verdict


def test_every_suite_has_cases_that_stand_for_it():
    assert {name.split("/")[0] for name in FEW} == {group.suite for group in GROUPS}
