"""Three tiers of tests by marker, cheapest first, and how long a run may take.

`unit` needs one process, `functional` starts several ranks, `exhaustive` is the rest of every matrix. A test under
unit_tests or functional_tests belongs to the tier of its folder unless it is marked `exhaustive`.
"""

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.patience import slowness

TIERS = ("unit", "functional", "exhaustive")
NOT_REACHED = "not within the time of --budget"


class Budget:
    """The time of a run. When it is spent no test starts, and the one that runs ends; both count as not reached.

    Tests of several ranks start if the unit tests took at most a third of it. They have time limits of their own
    (stores, process groups, stalls), which hold on machines of usual speed.
    """

    def __init__(self, minutes: float | None) -> None:
        self._start, self._limit = time.monotonic(), 60 * minutes if minutes else math.inf
        self._is_spent = self._interruptible = False
        self._tier = TIERS[0]
        if minutes is not None:
            # Not SIGALRM, which pytest-timeout takes.
            signal.signal(signal.SIGUSR1, self._end)
            main = threading.main_thread().ident
            timer = threading.Timer(self._limit, signal.pthread_kill, (main, signal.SIGUSR1))
            timer.daemon = True
            timer.start()

    def _end(self, *_: object) -> None:
        self._is_spent = True
        if self._interruptible:
            pytest.skip(NOT_REACHED)

    @contextmanager
    def phase(self, tier: str) -> Iterator[None]:
        """Around the set-up or the call of a test."""
        if self._tier == TIERS[0] != tier:
            self._is_spent |= time.monotonic() - self._start > self._limit / 3
        self._tier = tier
        self._interruptible = True
        try:
            if self._is_spent:
                pytest.skip(NOT_REACHED)
            yield
        finally:
            self._interruptible = False


BUDGET = pytest.StashKey[Budget]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, metavar="MINUTES", help="end after this time; the summary counts the rest")


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its limit
def pytest_configure(config: pytest.Config) -> None:
    config.stash[BUDGET] = Budget(config.getoption("--budget"))
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
    items.sort(key=lambda item: TIERS.index(tier_of(item)))


@pytest.hookimpl(wrapper=True, trylast=True)  # inside of what other plugins do around a test
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with item.config.stash[BUDGET].phase(tier_of(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)  # inside of what other plugins do around a test
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with item.config.stash[BUDGET].phase(tier_of(item)):
        return (yield)


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
