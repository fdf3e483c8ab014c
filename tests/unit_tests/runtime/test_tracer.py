"""Measured steps: their clocks, their files, and warnings instead of an end where there is no file."""

import json
import logging
from pathlib import Path

from megatron.seq1f1b.runtime import Tracer
from megatron.seq1f1b.runtime.tracer import Measured, from_barrier
from megatron.seq1f1b.schedule import Placement, Shape, Span, parse_action
from support.one_rank import Stage, executor, run

SHAPE = Shape(Placement(3), 1)


def rank(clock: str, origin: float, start: float, rank: int) -> Measured:
    return Measured(clock, origin, [Span(parse_action(f"{rank}F0"), start, start + 1.0)], 7)


def test_clocks_apart_count_from_the_barrier():
    """The third rank is on a machine that started a day earlier; the second was late to leave the barrier."""
    day = 86400.0
    measured = [rank("a", 100.0, 100.5, 0), rank("a", 100.25, 101.5, 1), rank("b", day, day + 2.5, 2)]
    timeline = from_barrier(SHAPE, measured, {"iteration": 4})
    assert [(spans[0].start, spans[0].end) for spans in timeline.ranks] == [(0.5, 1.5), (1.5, 2.5), (2.5, 3.5)]
    assert timeline.meta == {"iteration": 4, "peak_memory_bytes": [7, 7, 7]}


def test_chosen_iterations_are_written(alone, tmp_path):
    iterations = iter((1, 2, 3))
    tracer = Tracer(tmp_path, {2}, lambda: next(iterations))
    traced = executor(tracer=tracer)
    for _ in range(3):
        run(traced, Stage())
    (path,) = tmp_path.iterdir()
    assert path.name == "iteration-2-pipeline-0.json"
    written = json.loads(path.read_text())
    assert written["meta"]["segment_lengths"] == [4, 4] and written["meta"]["schedule"] == "1f1b"
    spans = written["ranks"][0]
    assert [f"{span['kind']}{span['microbatch']}.{span['segment']}" for span in spans[:3]] == ["F0.0", "F0.1", "B0.1"]
    assert all(0 <= span["start"] <= span["end"] for span in spans)


def test_a_trace_that_cannot_be_written_is_a_warning(alone, tmp_path, caplog):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/none")):
        with caplog.at_level(logging.WARNING):
            run(executor(tracer=Tracer(folder, {1}, lambda: 1)), Stage())
        assert f"{folder}/iteration-1-pipeline-0.json is not written" in caplog.text


def test_a_start_beyond_all_chosen_iterations_warns_once(alone, tmp_path, caplog):
    iterations = iter((51, 52))
    tracer = Tracer(tmp_path, {3, 7}, lambda: next(iterations))
    traced = executor(tracer=tracer)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            run(traced, Stage())
    assert caplog.text.count("none of --pipeline-trace-iterations 3 7 is traced") == 1
    assert not list(tmp_path.iterdir())
