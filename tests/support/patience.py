"""Time limits that end what hangs, on slow machines too."""

import time
from functools import cache


def patient(seconds: float) -> float:
    """A time limit: three times `seconds`, and more on a machine slower than the one that they were chosen on."""
    return 3 * seconds * slowness()


@cache
def slowness() -> float:
    """How much longer this machine takes than the one that time limits were chosen on: 1 to 10."""
    return min(max(min(_loop() for _ in range(3)) / 0.06, 1.0), 10.0)


def _loop() -> float:
    start = time.perf_counter()
    sum(number * number for number in range(10**6))
    return time.perf_counter() - start
