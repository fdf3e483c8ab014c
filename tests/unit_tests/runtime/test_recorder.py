"""Spans on a CPU, and on a GPU by events."""

from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.runtime.recorder import Recorder
from megatron.seq1f1b.schedule import parse_action


class Event:
    """A CUDA event: `recorded` counts them, and each took place 10 ms after the one before."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.time = 10.0 * Event.recorded

    def elapsed_time(self, later: "Event") -> float:
        return later.time - self.time


@pytest.fixture
def gpu(monkeypatch):
    """What a recorder uses of a GPU, with a count of the times that the host waits for it."""
    gpu = SimpleNamespace(waits=0)

    def synchronize(device=None) -> None:
        gpu.waits += 1

    Event.recorded = 0
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return gpu


def test_a_gpu_is_timed_by_events_and_nothing_waits_in_a_step(gpu):
    recorder = Recorder(torch.device("cuda"))
    before = gpu.waits
    for text in ("0F0.0", "0F0.1", "0B0.1"):
        with recorder.span(parse_action(text)):
            pass
    assert gpu.waits == before and Event.recorded == 7
    spans = recorder.spans()
    assert [str(span.action) for span in spans] == ["0F0.0", "0F0.1", "0B0.1"]
    assert [round(span.end - span.start, 6) for span in spans] == [0.01, 0.01, 0.01]
    assert spans[0].start - recorder.origin == pytest.approx(0.01)


def test_on_a_cpu_spans_follow_one_another():
    recorder = Recorder(torch.device("cpu"))
    for text in ("0F0", "0B0"):
        with recorder.span(parse_action(text)):
            pass
    first, second = recorder.spans()
    assert recorder.origin <= first.start <= first.end <= second.start <= second.end


def test_collectives_of_several_buckets_are_one_span():
    recorder, futures = Recorder(torch.device("cpu")), []
    for _ in range(2):
        future = torch.futures.Future()
        running = recorder.collective("REDUCE", 1)
        running(SimpleNamespace(works=[SimpleNamespace(get_future=lambda future=future: future)]))
        futures.append(future)
    recorder.collective("GATHER", 1)(None)  # was waited for at once, so it did not run beside compute
    for future in futures:
        future.set_result(None)
    (span,) = recorder.spans()
    assert str(span.action) == "1REDUCE" and span.start < span.end
