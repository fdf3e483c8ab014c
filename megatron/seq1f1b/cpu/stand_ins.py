"""What stands in for ``torch.cuda`` when the device is the CPU.

CPU work is finished when the call returns, so a stream has nothing to order and an event nothing
to wait for.
"""

import contextlib
import resource
import sys
import time
from pathlib import Path

import torch


class Stream:
    """A stream on which everything is already done."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def synchronize(self):
        pass

    def query(self):
        return True

    @staticmethod
    def priority_range():
        return 0, 0


class Event:
    """The moment at which it was recorded."""

    def __init__(self, *args, **kwargs):
        self._seconds = 0.0

    def record(self, stream=None):
        self._seconds = time.perf_counter()

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to ``end``."""
        return (end._seconds - self._seconds) * 1e3


def stream(stream):
    return contextlib.nullcontext()


def current_stream(device=None):
    return Stream()


def current_device():
    # Not an index: callers pass it on as `device=`.
    return torch.device("cpu")


def nothing(*args, **kwargs):
    return None


def no(*args, **kwargs):
    return False


def one_device():
    return 1


def resident_bytes(device=None) -> int:
    """Memory of this process that is in RAM now."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # macOS
        return peak_resident_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes(device=None) -> int:
    """The most memory that this process has had in RAM."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The kernel counts the peak now and then only, and may be behind.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, resident_bytes())


def memory_stats(device=None) -> dict[str, int]:
    now, peak = resident_bytes(), peak_resident_bytes()
    return {
        "allocated_bytes.all.current": now,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": now,
        "reserved_bytes.all.peak": peak,
        "allocation.all.current": 0,
    }
