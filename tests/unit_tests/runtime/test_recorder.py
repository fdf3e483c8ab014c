"""Spans, readings and peak memory of a step, on a CPU and by events on a GPU."""

import time
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.runtime.recorder import PeakMemory, Recorder
from megatron.seq1f1b.schedule import Kind, parse_action

CPU = torch.device("cpu")
MIB = 2**20


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
def waits(monkeypatch):
    """Counts how often the host waits for a GPU, here one of events alone."""
    waits = []
    Event.recorded = 0
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    return waits


def record(recorder: Recorder, *actions: str, seconds: float = 0.0) -> None:
    for action in actions:
        with recorder.span(parse_action(action)):
            time.sleep(seconds)


def test_a_gpu_is_timed_by_events_and_nothing_waits_in_a_step(waits):
    with Recorder(torch.device("cuda"), traced=True) as recorder:
        before = len(waits)
        record(recorder, "0F0.0", "0F0.1", "0B0.1")
    assert len(waits) == before and Event.recorded == 7
    spans = recorder.spans()
    assert [str(span.action) for span in spans] == ["0F0.0", "0F0.1", "0B0.1"]
    assert [round(span.end - span.start, 6) for span in spans] == [0.01, 0.01, 0.01]
    assert spans[0].start - recorder.origin == pytest.approx(0.01)
    reading = recorder.reading()
    assert (reading.busy, reading.duration) == (pytest.approx(0.03), pytest.approx(0.06))


def test_a_rank_is_busy_while_actions_run(memory_of_the_process):
    with Recorder(CPU) as recorder:
        record(recorder, "0F0")
        time.sleep(0.04)
        record(recorder, "0B0", seconds=0.02)
    first, second = recorder.spans()
    assert recorder.origin <= first.start <= first.end <= second.start <= second.end
    reading = recorder.reading()
    assert 0.02 <= reading.busy < reading.duration
    assert reading.duration - reading.busy >= 0.04


def test_the_peak_counts_what_was_freed_and_not_what_was_before(memory_of_the_process):
    before = torch.ones(64 * MIB // 4)
    memory = PeakMemory(CPU)
    step = torch.ones(128 * MIB // 4)
    del step
    assert 120 * MIB < memory.peak() < 160 * MIB
    assert before.sum() > 0
    # Small tensors are freed into the heap of the process, which keeps the pages; the next step finds them there.
    for _ in range(2):
        with Recorder(CPU) as recorder:
            step = [torch.ones(8192) for _ in range(2000)]
            kept = torch.ones(8)  # at the end of the heap
            del step
    assert recorder.reading().peak_memory > 50 * MIB
    assert kept.sum() > 0


def test_collectives_of_several_buckets_are_one_span(memory_of_the_process):
    recorder, futures = Recorder(CPU), []
    for _ in range(2):
        future = torch.futures.Future()
        running = recorder.collective(Kind.REDUCE, 1)
        running(SimpleNamespace(works=[SimpleNamespace(get_future=lambda future=future: future)]))
        futures.append(future)
    recorder.collective(Kind.GATHER, 1)(None)  # was waited for at once, so it did not run beside compute
    for future in futures:
        future.set_result(None)
    (span,) = recorder.spans()
    assert str(span.action) == "1REDUCE" and span.start < span.end
