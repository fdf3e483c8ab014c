"""Schedules and timelines are read as they were written."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.files.schedule_file import read_schedule, write_schedule
from megatron.seq1f1b.files.timeline_file import read_timeline, write_timeline
from megatron.seq1f1b.schedule import FAMILIES, Action, Costs, Kind, Placement, Shape, Timeline, build, moved, simulate

from ..schedule.strategies import fixed, shapes


def test_csv_of_other_programs(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,,0F1,0B0,0B1\r\n,1F0,1B0,1F1,1I1,1W1\r\n", encoding="utf-8-sig")
    schedule = read_schedule(path)
    assert schedule.shape == Shape(Placement(2), 2, 1)
    assert schedule.ranks[1][-1] == Action(Kind.W, 1, 1, 0)


UNIT = ("stage", "chunk", "microbatch", "segment")


@fixed
@given(
    st.sampled_from(list(FAMILIES)),
    shapes(ranks=4, microbatches=4, segments=3, chunks=3),
    st.sampled_from([0, 0.5]),
)
def test_schedules_and_timelines_out_and_in(tmp_path_factory, family, shape, offloads):
    path, schedule = tmp_path_factory.mktemp("files") / "file", build(family, shape)
    with_moves = moved(schedule, offloads)
    write_schedule(with_moves, path)
    again = read_schedule(path)
    assert again.ranks == with_moves.ranks and again.without_moves().ranks == schedule.ranks
    # The file does not show which one it is where a V and a loop are the same.
    assert (again.shape == shape) or not shape.placement.turns or shape.num_ranks == 1

    simulated = simulate(schedule, Costs.uniform(shape, 0.1, 0.2, 0.3, 0.01))
    timeline = Timeline(shape, simulated.ranks, "s", {"schedule": family})
    write_timeline(timeline, path)
    assert read_timeline(path) == timeline
    data = json.loads(path.read_text())
    assert data["meta"]["num_ranks"] == shape.num_ranks and data["meta"]["schedule"] == family
    assert data["ranks"][0][0] == {"kind": "F", "start": 0.0, "end": 0.1} | dict.fromkeys(UNIT, 0)
