"""Three tiers of tests by marker, cheapest first, and how long a run may take.

`unit` needs one process, `functional` starts several ranks, `exhaustive` is the rest of every matrix. A test under
unit_tests or functional_tests belongs to the tier of its folder unless it is marked `exhaustive`.
"""

import time
from collections import Counter
from pathlib import Path

import pytest

TIERS = ("unit", "functional", "exhaustive")
NOT_REACHED = "the time of --budget was spent"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget", type=float, metavar="MINUTES", help="start no test after this time; the summary counts those left"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED] = time.monotonic()


_STARTED = pytest.StashKey[float]()


def tier_of(item: pytest.Item) -> str:
    if item.get_closest_marker("exhaustive"):
        return "exhaustive"
    return "unit" if "unit_tests" in Path(item.path).parts else "functional"


@pytest.hookimpl(tryfirst=True)  # -m selects by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item))
    items.sort(key=lambda item: TIERS.index(tier_of(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = item.config.getoption("--budget")
    if budget is not None and time.monotonic() - item.config.stash[_STARTED] > 60 * budget:
        pytest.skip(NOT_REACHED)


def pytest_terminal_summary(terminalreporter) -> None:
    seconds, tests, left = Counter(), Counter(), Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        tier = next((tier for tier in TIERS if tier in getattr(report, "keywords", ())), None)
        if tier is None or not isinstance(report, pytest.TestReport):
            continue
        seconds[tier] += report.duration
        is_left = report.skipped and NOT_REACHED in str(report.longrepr)
        left[tier] += is_left
        tests[tier] += not is_left and (report.when == "call" or report.when == "setup" and not report.passed)
    terminalreporter.section("tiers")
    for tier in TIERS:
        rest = f", {left[tier]} not reached" if left[tier] else ""
        terminalreporter.line(f"{tier:<10} {tests[tier]:5} tests {seconds[tier]:7.0f} s{rest}")
