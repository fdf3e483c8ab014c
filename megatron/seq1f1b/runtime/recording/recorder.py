"""Measures the actions and the memory of one rank in one step.

Tested in runtime/test_tracer.py.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch

from ...schedule import COMPUTE_KINDS, Action, Span, busy_time


class Reading(NamedTuple):
    """One rank in one step."""

    busy: float  # seconds in forwards and backwards
    duration: float  # seconds to the end of the last one
    peak_memory: float  # bytes above those at the start


class StepRecorder(Protocol):
    """Notes the actions of one rank in one step."""

    def span(self, action: Action) -> AbstractContextManager[None]:
        """A context whose body is `action`; for the copies of an OFFLOAD or RELOAD it is entered in their thread."""


# An action with the moments of its start and its end. A plain tuple, as each takes the host time within a step.
_Mark = tuple[Action, Any, Any]


class Recorder(StepRecorder):
    """One rank in one step, which runs inside `with`; nothing in it waits for the device.

    A `traced` step begins when the device is idle, at `origin` of this machine's clock. On a GPU only a traced step
    resets the peak of memory, which Megatron's reports share; otherwise the peak is that of the whole run.
    """

    def __init__(self, device: torch.device, traced: bool = False) -> None:
        self._device = device
        if traced or device.type != "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._allocated = torch.cuda.memory_allocated(device)
        # Marks a moment: on a GPU an event on its current stream, so that nothing waits.
        self.now = _event if device.type == "cuda" else time.perf_counter
        self._marks: list[_Mark] = []
        self._collectives: list[tuple[Action, Any, torch.futures.Future]] = []
        self._peak = 0
        if traced and device.type == "cuda":
            torch.cuda.synchronize(device)
        self._start = self.now()
        self.origin = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._peak = torch.cuda.max_memory_allocated(self._device) - self._allocated

    def span(self, action: Action) -> AbstractContextManager[None]:
        return _Timed(self.now, self._marks, action)

    def collective(self, action: Action, start: Any, handle: Any) -> None:
        """Record a REDUCE or GATHER with this `handle` that began at the mark `start`, if it runs beside compute.

        Its end is taken in the thread of gloo, or on the stream that waits for NCCL.
        """
        for part in getattr(handle, "works", ()):
            try:
                end = part.get_future().then(lambda _: self.now())
            except RuntimeError:  # gloo's reduce-scatter has no callback
                end = torch.futures.Future()
                handle.wait = partial(self._wait_and_mark, handle.wait, end)
            self._collectives.append((action, start, end))

    def _wait_and_mark(self, wait: Callable[[], Any], end: torch.futures.Future) -> None:
        wait()
        end.set_result(self.now())

    def reading(self) -> Reading:
        """The step in numbers; a GPU must have finished it."""
        spans = [
            self._span(action, began, ended) for action, began, ended in self._marks if action.kind in COMPUTE_KINDS
        ]
        spans.sort(key=lambda span: span.start)
        return Reading(
            busy=busy_time(spans),
            duration=max((span.end for span in spans), default=0.0),
            peak_memory=self._peak,
        )

    def spans(self) -> list[Span]:
        """All recorded actions by start, in seconds of this machine's monotonic clock, once collectives are over. The
        buckets of a chunk share one span."""
        collectives = [(action, start, end.wait()) for action, start, end in self._collectives]
        spans: dict[Action, Span] = {}
        for action, began, ended in (*self._marks, *collectives):
            span = self._span(action, began, ended)
            start = self.origin + span.start
            end = self.origin + span.end
            if action in spans:
                earlier = spans[action]
                start = min(start, earlier.start)
                end = max(end, earlier.end)
            spans[action] = Span(action, start, end)
        return sorted(spans.values(), key=lambda span: span.start)

    def _span(self, action: Action, start: Any, end: Any) -> Span:
        """The span between two moments, in seconds since the start of the step."""
        return Span(action, _seconds(self._start, start), _seconds(self._start, end))


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class _Timed:
    """A context manager as a class, since a generator would take the host several times as long."""

    __slots__ = ("_action", "_marks", "_now", "_start")

    def __init__(self, now: Callable[[], Any], marks: list[_Mark], action: Action) -> None:
        self._now = now
        self._marks = marks
        self._action = action

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._action, self._start, self._now()))
