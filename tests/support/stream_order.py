"""CUDA streams that run nothing and know their order: what a GPU is sure to have ended before an operation begins.

Every stream has a clock: for itself and each stream that it has waited for, the number of operations that come before
its next one (vector clocks). What is issued on one stream is ordered; between streams only waits order anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatron.seq1f1b.process.patches import Patch, PatchTable


class Moment(NamedTuple):
    """An operation: the stream that runs it, and its number there."""

    stream: "Stream"
    number: int


class Stream:
    """Takes the place of torch.cuda.Stream."""

    def __init__(self, *args, **kwargs) -> None:
        self.clock: dict[Stream, int] = {self: 0}

    def run(self) -> Moment:
        """One more operation on this stream."""
        self.clock[self] += 1
        return Moment(self, self.clock[self])

    def comes_after(self, moment: Moment) -> bool:
        """Whether the next operation on this stream is sure to begin when that one has ended."""
        return self.clock.get(moment.stream, 0) >= moment.number

    def wait_stream(self, other: "Stream") -> None:
        self._join(other.clock)

    def wait_event(self, event: "Event") -> None:
        self._join(event.clock)

    def record_event(self, event: "Event") -> None:
        event.record(self)

    def _join(self, clock: dict["Stream", int]) -> None:
        for stream, number in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), number)


class Event:
    """Takes the place of torch.cuda.Event."""

    def __init__(self, *args, **kwargs) -> None:
        self.clock: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)


class Streams:
    """The streams of a device: `compute`, which is there from the start, and those that a program makes."""

    def __init__(self) -> None:
        self.compute = Stream()
        self.current = self.compute

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.current = stream
        yield
        self.current = before

    @property
    def patches(self) -> PatchTable:
        """What programs call of torch.cuda."""
        reason = "knows what waits for what"
        return (
            Patch("torch.cuda.Stream", Stream, reason),
            Patch("torch.cuda.Event", Event, reason),
            Patch("torch.cuda.current_stream", lambda *args: self.current, reason),
            Patch("torch.cuda.stream", self.on, reason),
        )
