"""Time limits that end what hangs, on slow machines too."""

import time
from functools import cache


def patient(seconds: float) -> float:
    """A time limit: three times `seconds`, and more on a machine slower than the one that they were chosen on."""
    return 3 * _slowness() * seconds


@cache
def _slowness() -> float:
    start = time.perf_counter()
    sum(number * number for number in range(10**6))
    return max(1.0, (time.perf_counter() - start) / 0.06)
