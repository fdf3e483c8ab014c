"""Spans, readings and peak memory of a step, on a CPU and by events on a GPU; clocks of several ranks."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.runtime import Tracer
from megatron.seq1f1b.runtime.recording.recorder import Recorder
from megatron.seq1f1b.runtime.recording.tracer import RankTrace, from_barrier
from megatron.seq1f1b.schedule import Action, Kind, Placement, Shape, Span, parse_action
from support.linear_stages import Stage, executor, run

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


def test_a_gpu_is_timed_by_events_and_nothing_waits_in_a_step(monkeypatch):
    waits = []  # of the host for the GPU
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    with Recorder(torch.device("cuda"), traced=True) as recorder:
        before = len(waits)
        for action in ("0F0.0", "0F0.1", "0B0.1"):
            with recorder.span(parse_action(action)):
                pass
    assert len(waits) == before and Event.recorded == 7
    spans = recorder.spans()
    assert [str(span.action) for span in spans] == ["0F0.0", "0F0.1", "0B0.1"]
    assert [round(span.end - span.start, 6) for span in spans] == [0.01, 0.01, 0.01]
    assert spans[0].start - recorder.origin == pytest.approx(0.01)
    reading = recorder.reading()
    assert (reading.busy, reading.duration) == (pytest.approx(0.03), pytest.approx(0.06))


def test_the_two_of_a_pair_share_their_time(monkeypatch, memory_of_the_process):
    moments = iter(map(float, range(10)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    recorder = Recorder(torch.device("cpu"))
    with recorder.span(parse_action("0F0.0")):
        pass
    with recorder.span(parse_action("0B0.0")), recorder.span(parse_action("0F1.0")):
        pass
    reading = recorder.reading()
    assert reading.busy == 1 + 3
    assert [str(span.action) for span in recorder.spans()] == ["0F0.0", "0B0.0", "0F1.0"]


def test_the_peak_counts_what_was_freed_and_not_what_was_before(memory_of_the_process):
    before = torch.ones(64 * MIB // 4)
    with Recorder(CPU) as recorder:
        step = torch.ones(128 * MIB // 4)
        del step
    assert 120 * MIB < recorder.reading().peak_memory < 160 * MIB
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
    recorder, future = Recorder(CPU), torch.futures.Future()
    for _ in range(2):
        works = [SimpleNamespace(get_future=lambda: future)]
        recorder.collective(Action(Kind.REDUCE, 1), recorder.now(), SimpleNamespace(works=works))
    recorder.collective(Action(Kind.GATHER, 1), recorder.now(), None)  # waited for at once, not beside compute
    future.set_result(None)
    (span,) = recorder.spans()
    assert str(span.action) == "1REDUCE" and span.start < span.end


SHAPE = Shape(Placement(3), 1)


def rank(clock: str, origin: float, start: float, rank: int) -> RankTrace:
    spans = [Span(parse_action(f"{rank}F0"), start, start + 1.0)]
    return RankTrace(machine=clock, origin=origin, spans=spans, peak_memory=7)


def test_clocks_apart_count_from_the_barrier():
    """The third rank is on a machine that started a day earlier; the second was late to leave the barrier."""
    day = 86400.0
    measured = [rank("a", 100.0, 100.5, 0), rank("a", 100.25, 101.5, 1), rank("b", day, day + 2.5, 2)]
    timeline = from_barrier(SHAPE, measured, {"iteration": 4})
    assert [(spans[0].start, spans[0].end) for spans in timeline.ranks] == [(0.5, 1.5), (1.5, 2.5), (2.5, 3.5)]
    assert timeline.meta == {"iteration": 4, "peak_memory_bytes": [7, 7, 7]}


def test_a_start_beyond_all_chosen_iterations_warns_once(alone, tmp_path, caplog):
    traced = executor(tracer=Tracer(tmp_path, {3, 7}, partial(next, iter((51, 52)))))
    for _ in range(2):
        run(traced, Stage())
    assert caplog.text.count("none of --pipeline-trace-iterations 3 7 is traced") == 1
    assert not list(tmp_path.iterdir())
