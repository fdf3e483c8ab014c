"""How busy this rank was in its last training step, and what the step held in memory: measured in every step."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..schedule import Action

# Of the resident memory of a process, which stands for that of a device on a CPU; see clear_refs in proc(5).
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


class Reading(NamedTuple):
    """One rank in one step: seconds in actions, seconds from the first to the last, bytes beyond those before it."""

    busy: float
    duration: float
    peak_memory: float


class Clock(Protocol):
    """Marks moments of a step: `now` returns the number of a mark, `seconds` the time between two."""

    def restart(self) -> None: ...

    def now(self) -> int: ...

    def seconds(self, start: int, end: int) -> float: ...


class StepMeter:
    """Made once. A step costs two marks per action and two queries of the allocator; nothing waits for the device."""

    def __init__(self) -> None:
        self._clock: Clock = HostClock()
        self._spans: list[tuple[int, int]] = []
        self._whole: tuple[int, int] | None = None
        self._peak = 0

    @contextmanager
    def step(self, device: torch.device) -> Iterator[None]:
        """Around the actions of a step on `device`; forgets the one before."""
        if device.type == "cuda" and not isinstance(self._clock, DeviceClock):
            self._clock = DeviceClock()
        self._spans.clear()
        self._whole = None
        self._clock.restart()
        baseline = _memory_before(device)
        start = self._clock.now()
        yield
        self._whole = start, self._clock.now()
        self._peak = _highest_memory(device) - baseline

    def span(self, action: Action) -> AbstractContextManager[None]:
        """Around one action."""
        return _Span(self._clock, self._spans)

    def reading(self) -> Reading | None:
        """The reading of the last step, None before the first. On a GPU, the work of the step has to be done."""
        if self._whole is None:
            return None
        seconds = self._clock.seconds
        return Reading(sum(seconds(*span) for span in self._spans), seconds(*self._whole), self._peak)


class _Span:
    """A class: a generator would take the host several times as long, twice in every unit."""

    __slots__ = ("_clock", "_spans", "_start")

    def __init__(self, clock: Clock, spans: list[tuple[int, int]]) -> None:
        self._clock = clock
        self._spans = spans

    def __enter__(self) -> None:
        self._start = self._clock.now()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._start, self._clock.now()))


class HostClock:
    """The clock of the processor, which runs the actions itself."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def restart(self) -> None:
        self._times.clear()

    def now(self) -> int:
        self._times.append(time.perf_counter())
        return len(self._times) - 1

    def seconds(self, start: int, end: int) -> float:
        return self._times[end] - self._times[start]


class DeviceClock:
    """Events on the current stream of a GPU, made once and recorded again in every step."""

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._used = 0

    def restart(self) -> None:
        self._used = 0

    def now(self) -> int:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[self._used].record()
        self._used += 1
        return self._used - 1

    def seconds(self, start: int, end: int) -> float:
        return self._events[start].elapsed_time(self._events[end]) / 1e3


def _memory_before(device: torch.device) -> int:
    if device.type != "cuda" and _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text(_FORGET_PEAK)
    return torch.cuda.memory_allocated(device)


def _highest_memory(device: torch.device) -> int:
    """On a GPU the peak of the whole run: resetting it would change what Megatron reports."""
    return torch.cuda.max_memory_allocated(device)
