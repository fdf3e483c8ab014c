"""How busy this rank was in its last training step, and what the step held in memory: measured in every step."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ..schedule import Action


class Clock(Protocol):
    """Marks moments: `now` returns a mark, `seconds` the time between two; `restart` invalidates all marks."""

    def restart(self) -> None: ...

    def now(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class HostClock:
    """The clock of the processor, which runs the actions itself. Marks are `time.perf_counter()`."""

    def restart(self) -> None:
        pass

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """Events on the current stream of a GPU, made once and recorded again after a restart.

    Marking does not wait for the device; `seconds` needs the device to have passed both marks.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def restart(self) -> None:
        self._used = 0

    def now(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock for what runs on `device`."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class PeakMemory:
    """Counts from its creation: activations, caches, messages and workspace, but not weights or optimizer state.

    The numbers are those of `torch.cuda`: PyTorch's allocator on a GPU, the resident set of the process on a CPU (see
    cpu/stand_ins.py). On a GPU `resets_peak` also resets the peak in Megatron's reports; without it the peak is that
    of the whole run.
    """

    def __init__(self, device: torch.device, resets_peak: bool = True) -> None:
        self._device = device
        if resets_peak or device.type != "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._baseline = torch.cuda.memory_allocated(device)

    def peak(self) -> int:
        """Bytes."""
        return torch.cuda.max_memory_allocated(self._device) - self._baseline


class Reading(NamedTuple):
    """One rank in one step: seconds in actions, seconds from the first to the last, bytes beyond those before it."""

    busy: float
    duration: float
    peak_memory: float


class StepMeter:
    """Made once. A step costs two marks per action and two queries of the allocator; nothing waits for the device."""

    def __init__(self) -> None:
        self._clock: Clock = HostClock()
        self._spans: list[tuple[Any, Any]] = []
        self._whole: tuple[Any, Any] | None = None
        self._peak = 0

    @contextmanager
    def step(self, device: torch.device) -> Iterator[None]:
        """Around the actions of a step on `device`; forgets the one before."""
        if device.type == "cuda" and not isinstance(self._clock, DeviceClock):
            self._clock = DeviceClock()
        self._spans.clear()
        self._whole = None
        self._clock.restart()
        memory = PeakMemory(device, resets_peak=False)
        start = self._clock.now()
        yield
        self._whole = start, self._clock.now()
        self._peak = memory.peak()

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

    def __init__(self, clock: Clock, spans: list[tuple[Any, Any]]) -> None:
        self._clock = clock
        self._spans = spans

    def __enter__(self) -> None:
        self._start = self._clock.now()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._start, self._clock.now()))
