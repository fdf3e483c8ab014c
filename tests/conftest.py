"""Three tiers of tests by marker, cheapest first, and the time of each.

`unit` needs one process, `functional` starts several ranks, `exhaustive` is the rest of every matrix. A test under
unit_tests or functional_tests belongs to the tier of its folder unless it is marked `exhaustive`.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.patience import slowness

TIERS = ("unit", "functional", "exhaustive")
# These take long, so that a worker that started one last would be the only one at work in the end.
LONG = {"equality", "gpu_suite", "quickstart", "rehearsal", "seq1f1b_training", "slurm", "training_features"}
# Megatron compiles an extension when a part of a layer is recomputed; other checkouts would compile it anew each time.
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its limit
def pytest_configure(config: pytest.Config) -> None:
    if config.option.timeout is None:
        config.option.timeout = slowness() * float(config.getini("timeout"))


def tier_of(item: pytest.Item) -> str:
    if item.get_closest_marker("exhaustive"):
        return "exhaustive"
    return "unit" if "unit_tests" in Path(item.path).parts else "functional"


@pytest.hookimpl(tryfirst=True)  # -m selects by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item))
    items.sort(key=lambda item: (TIERS.index(tier_of(item)), item.path.stem.removeprefix("test_") not in LONG))


def pytest_collection_finish() -> None:
    """What the imports have made stays, so collections of garbage need not look at it."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter) -> None:
    """The tests and seconds of each tier, and how many tests --session-timeout, or -x, left out."""
    seconds, tests = Counter(), dict.fromkeys(TIERS, 0)
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            tier = next(tier for tier in TIERS if tier in report.keywords)
            seconds[tier] += report.duration
            tests[tier] += report.when == "call" or (report.when == "setup" and not report.passed)
    terminalreporter.section("tiers")
    for tier in TIERS:
        terminalreporter.line(f"{tier:<10} {tests[tier]:5} tests {seconds[tier]:7.0f} s")
    left = terminalreporter._session.testscollected - sum(tests.values())
    if left and not terminalreporter.config.option.collectonly:
        terminalreporter.line(f"{left} tests were not reached")


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A model leaves variables that choose its attention in the environment, and so in that of later ranks."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
