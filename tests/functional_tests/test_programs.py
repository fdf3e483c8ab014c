"""Programs that call Megatron's schedules run on segments as they are (see programs/comparison.py)."""

import re

import pytest

from functional_tests.programs.comparison import SETTINGS, run_programs
from support.on_ranks import few_of

FEW, MANY = 3, 12  # programs for each setting, every day and in exhaustive tests
RANKS = {"pp1": 1} | dict.fromkeys(("pp4", "pp4-hybrid", "pp2-tp2", "pp2-dp2", "pp2-dp2-experts", "pp2-cp2"), 4)
EVERY_DAY = [name for name in SETTINGS if RANKS.get(name, 2) < 4]


@pytest.fixture(scope="module")
def verdicts(launch, request):
    """Lines about the programs of a setting; those that have as many ranks share a job."""
    found: dict[str, list[str]] = {}

    def verdicts(name: str, seeds: int) -> list[str]:
        if name not in found:
            ranks = RANKS.get(name, 2)
            names = [other for other in SETTINGS if RANKS.get(other, 2) == ranks]
            launch.call(ranks, run_programs, timeout=600, names=names, seeds=seeds)
            for setting, line in re.findall(r"^program ([^/]+)/\d+: (.*)$", launch.last.log, re.MULTILINE):
                found.setdefault(setting, []).append(line)
        return found[name]

    return verdicts


@pytest.mark.parametrize("name", few_of(SETTINGS, EVERY_DAY))
def test_a_program_trains_as_with_whole_sequences(verdicts, name, request):
    seeds = MANY if request.config.getoption("-m") == "" else FEW
    lines = verdicts(name, seeds)
    assert len(lines) == seeds and all(line.startswith("equal, ") for line in lines), "\n".join(lines)
