"""Times of the actions of a step, and its memory."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch

from ..schedule import COMPUTE_KINDS, Action, Kind, Span


class Reading(NamedTuple):
    """One rank in one step: seconds in actions, seconds from its start to the end of its last action, and the most
    bytes beyond those before it: activations, caches, messages, workspace."""

    busy: float
    duration: float
    peak_memory: float


class Recorder:
    """One rank in one step, which runs inside `with`. An action takes two marks; nothing waits for the device.

    A `traced` step begins when the device is idle, at `origin` of this machine's clock. Memory is that of PyTorch's
    allocator on a GPU, of the resident set of the process on a CPU (cpu/stand_ins.py). On a GPU only a traced step
    resets the peak, also that of Megatron's reports; otherwise it is that of the whole run.
    """

    def __init__(self, device: torch.device, traced: bool = False) -> None:
        self._device = device
        if traced or device.type != "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._allocated = torch.cuda.memory_allocated(device)
        # Marks a moment: on a GPU an event on its current stream, so that nothing waits.
        self._now = _event if device.type == "cuda" else time.perf_counter
        self._marks: list[tuple[Action, Any, Any]] = []
        self._collectives: list[tuple[Action, Any, torch.futures.Future]] = []
        self._peak = 0
        if traced and device.type == "cuda":
            torch.cuda.synchronize(device)
        self._start = self._now()
        self.origin = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._peak = torch.cuda.max_memory_allocated(self._device) - self._allocated

    def span(self, action: Action) -> AbstractContextManager[None]:
        return _Timed(self._now, self._marks, action)

    def collective(self, kind: Kind, stage: int) -> Callable[[Any], None]:
        """Time a REDUCE or GATHER from now; call the result with the handle as soon as the collective runs.

        Only collectives beside compute are recorded. Their end is taken in the thread of gloo, or on the stream that
        waits for NCCL. gloo's reduce-scatter has no callback; it ends when somebody has waited for it.
        """
        action, start = Action(kind, stage), self._now()

        def running(handle: Any) -> None:
            for part in getattr(handle, "works", ()):
                try:
                    end = part.get_future().then(lambda _: self._now())
                except RuntimeError:
                    end = self._when_waited_for(handle)
                self._collectives.append((action, start, end))

        return running

    def reading(self) -> Reading:
        """The step in numbers; a GPU must have finished it."""
        marks = [(start, end) for action, start, end in self._marks if action.kind in COMPUTE_KINDS]
        busy = sum(_seconds(start, end) for start, end in marks)
        return Reading(busy, _seconds(self._start, marks[-1][-1]) if marks else 0.0, self._peak)

    def spans(self) -> list[Span]:
        """All recorded actions by start, in seconds of this machine's monotonic clock; collectives must be over.

        The collectives of all buckets of a chunk are one span.
        """
        marks = self._marks + [(action, start, end.wait()) for action, start, end in self._collectives]
        spans: dict[Action, Span] = {}
        for action, start, end in marks:
            start, end = self._time(start), self._time(end)
            same = spans.get(action, Span(action, start, end))
            spans[action] = Span(action, min(start, same.start), max(end, same.end))
        return sorted(spans.values(), key=lambda span: span.start)

    def _time(self, mark: Any) -> float:
        return self.origin + _seconds(self._start, mark)

    def _when_waited_for(self, handle: Any) -> torch.futures.Future:
        end, wait = torch.futures.Future(), handle.wait

        def waited() -> None:
            wait()
            end.set_result(self._now())

        handle.wait = waited
        return end


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class _Timed:
    """A class, since a generator would take the host several times as long."""

    __slots__ = ("_action", "_marks", "_now", "_start")

    def __init__(self, now: Callable[[], Any], marks: list[tuple[Action, Any, Any]], action: Action) -> None:
        self._now = now
        self._marks = marks
        self._action = action

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._action, self._start, self._now()))
