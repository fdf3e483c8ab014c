"""Measured steps of ranks whose clocks have nothing in common."""

import json

from megatron.seq1f1b.runtime import PipelineExecutor, Tracer
from megatron.seq1f1b.runtime.tracer import Measured, from_barrier
from megatron.seq1f1b.schedule import Placement, Shape, Span, parse_action
from one_rank import Stage, run

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
    traced = PipelineExecutor("1f1b", 2, lambda length: [4, 4], tracer=tracer)
    for _ in range(3):
        run(traced, Stage())
    (path,) = tmp_path.iterdir()
    assert path.name == "iteration-2-pipeline-0.json"
    written = json.loads(path.read_text())
    assert written["meta"]["segment_lengths"] == [4, 4] and written["meta"]["schedule"] == "1f1b"
    spans = written["ranks"][0]
    assert [f"{span['kind']}{span['microbatch']}.{span['segment']}" for span in spans[:3]] == ["F0.0", "F0.1", "B0.1"]
    assert all(0 <= span["start"] <= span["end"] for span in spans)
