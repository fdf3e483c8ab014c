"""When the actions of a step ran."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..schedule import Action, Kind, Span


class Recorder:
    """The spans of one rank in one step. `origin` is when it was made, by this machine's clock.

    On a GPU the ends of an action are events on the current stream, read when the step is over, so that recording does
    not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark = _record_event if device.type == "cuda" else time.perf_counter
        self._marks: list[tuple[Action, Any, Any]] = []
        self._collectives: list[tuple[Action, Any, torch.futures.Future]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._origin = self._mark()
        self.origin = time.perf_counter()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Time the body as `action`."""
        start = self._mark()
        yield
        self._marks.append((action, start, self._mark()))

    def collective(self, kind: str, stage: int) -> Callable[[Any], None]:
        """Time a REDUCE or GATHER from now; call the result with the handle as soon as the collective runs.

        Only what runs beside compute is recorded. Its end is taken in the thread of gloo, or on the stream that waits
        for NCCL; a reduce-scatter by gloo, which has no callback, ends when it has been waited for.
        """
        action, start = Action(Kind(kind), stage), self._mark()

        def running(handle: Any) -> None:
            for part in getattr(handle, "works", ()):
                try:
                    end = part.get_future().then(lambda _: self._mark())
                except RuntimeError:
                    end = self._when_waited_for(handle)
                self._collectives.append((action, start, end))

        return running

    def _when_waited_for(self, handle: Any) -> torch.futures.Future:
        end, wait = torch.futures.Future(), handle.wait

        def waited() -> None:
            wait()
            end.set_result(self._mark())

        handle.wait = waited
        return end

    def spans(self) -> list[Span]:
        """What was recorded, in the order of the starts; times in seconds of this machine's monotonic clock.

        The collectives of one chunk, which has several buckets, are one span. All have to have been waited for.
        """
        marks = self._marks + [(action, start, end.wait()) for action, start, end in self._collectives]
        if isinstance(self._origin, torch.cuda.Event):
            torch.cuda.synchronize()
        spans: dict[Action, Span] = {}
        for action, start, end in marks:
            start, end = self._time(start), self._time(end)
            same = spans.get(action, Span(action, start, end))
            spans[action] = Span(action, min(start, same.start), max(end, same.end))
        return sorted(spans.values(), key=lambda span: span.start)

    def _time(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        return self.origin + self._origin.elapsed_time(mark) / 1e3


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
