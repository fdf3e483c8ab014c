"""When the compute actions of a step ran."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..schedule import Action, Span


class Recorder:
    """The spans of one rank in one step.

    On a GPU the ends of an action are events on the current stream, read when the step is over, so that recording does
    not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark = _record_event if device.type == "cuda" else time.perf_counter
        self._marks: list[tuple[Action, Any, Any]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._origin = self._mark()
        self._origin_time = time.perf_counter()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Time the body as `action`."""
        start = self._mark()
        yield
        self._marks.append((action, start, self._mark()))

    def spans(self) -> list[Span]:
        """What was recorded; times in seconds of this machine's monotonic clock."""
        if isinstance(self._origin, torch.cuda.Event):
            torch.cuda.synchronize()
        return [Span(action, self._time(start), self._time(end)) for action, start, end in self._marks]

    def _time(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        return self._origin_time + self._origin.elapsed_time(mark) / 1e3


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
