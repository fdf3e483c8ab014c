"""Every schedule gives the losses and gradients of Megatron's own unsegmented run (see equality/comparison.py).

Each case has an id of its own, suite/group/step: `-k pp2-moe`, `-k zb-h1-k3`. All selected cases with the same number
of ranks run in one job; if it dies, the case that was running has failed and another job goes on with the next.
"""

import re
from contextlib import suppress

import pytest

from functional_tests.equality.comparison import run_cases
from functional_tests.equality.suites import groups, representatives
from support.launch import ROOT
from support.on_ranks import few_of

FEW = representatives()
# The job of a case: those with the same number of ranks, of the same kind of layers and tier, share one.
CASES = {
    name: (group.ranks, group.model.transformer_engine is not None, name in FEW)
    for group in groups()
    for name in group.cases
}


@pytest.fixture(scope="session")
def verdict_on(request):
    """Gives the verdict on a case, by a job with all of the selected cases that share it."""
    items = [item for item in request.session.items if item.originalname == test_a_step.__name__]
    selected, found = {item.callspec.params["case"] for item in items}, {}

    def verdict_on(case: str) -> str:
        ranks, has_transformer_engine, _ = CASES[case]
        launch = request.getfixturevalue("launch_with_te" if has_transformer_engine else "launch")
        while case not in found:
            names = [name for name in CASES if name in selected and name not in found and CASES[name] == CASES[case]]
            with suppress(AssertionError):
                launch.call(ranks, run_cases, timeout=300 + 20 * len(names), names=names)
            found.update(re.findall(r"^case (\S+): (.*)$", launch.last.log, re.MULTILINE))
            died = next((name for name in names if name not in found), None)
            found[died] = f"the job ended:\n{launch.last.log[-6000:]}"
        return found[case]

    return verdict_on


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", few_of(CASES, FEW))
def test_a_step(verdict_on, case):
    verdict = verdict_on(case)
    assert verdict.startswith("equal, "), verdict


def test_the_steps_for_other_versions_exist():
    named = re.findall(r'^    "(.*)"$', (ROOT / "scripts" / "other_versions.sh").read_text(), re.MULTILINE)
    assert len(named) >= 12 and {*named} <= FEW & CASES.keys()


def test_every_suite_has_cases_that_stand_for_it():
    assert {name.split("/")[0] for name in FEW & CASES.keys()} == {group.suite for group in groups()}
