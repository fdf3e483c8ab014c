import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.files import read_timeline
from megatron.seq1f1b.schedule import (
    FAMILIES,
    Action,
    Costs,
    Kind,
    Placement,
    Shape,
    Span,
    Timeline,
    build,
    moved,
    read_csv,
    simulate,
    write_csv,
    write_timeline,
    written_together,
    written_whole,
)

from .strategies import fixed, shapes


def test_csv_of_other_programs(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,,0F1,0B0,0B1\r\n,1F0,1B0,1F1,1I1,1W1\r\n", encoding="utf-8-sig")
    schedule = read_csv(path)
    assert schedule.shape == Shape(Placement(2), 2, 1)
    assert schedule.ranks[1][-1] == Action(Kind.W, 1, 1, 0)


def test_what_is_written_through_a_link_is_where_it_points(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "later")
    with written_whole(tmp_path / "link") as unfinished:
        unfinished.write_text("x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "later").read_text() == "x"


def test_a_kill_between_two_files_leaves_no_mixture(tmp_path, monkeypatch):
    """The last of them tells that all are complete, and none of the earlier ones tells that of the new."""
    first = tmp_path / "first"
    last = tmp_path / "last"
    for path in (first, last):
        path.write_text("old")
    kills = RuntimeError("killed")
    monkeypatch.setattr(Path, "replace", Mock(side_effect=[None, kills]))
    with pytest.raises(RuntimeError), written_together(first, last) as unfinished:
        for path in unfinished:
            path.write_text("new")
    assert not last.exists()


@pytest.mark.parametrize(
    "value", [[], [[]], "much", None, {"0": 1}, 10**400, float("nan"), float("inf"), [1, "x"]], ids=str
)
def test_a_cost_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="cost table 'f'"):
        Costs.from_mapping(Shape(Placement(1), 1, 2), {"f": value})
    with pytest.raises(ValueError, match="table of names and numbers"):
        Costs.from_mapping(Shape(Placement(1), 1, 2), [value])


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
    write_csv(with_moves, path)
    again = read_csv(path)
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


def test_idle_time_of_a_timeline():
    spans = (Span(Action(Kind.F, 0, 0, 0), 10.0, 11.0), Span(Action(Kind.REDUCE, 0), 11.0, 14.0))
    timeline = Timeline(Shape(Placement(1), 1), (spans,))
    assert timeline.makespan == 4.0
    assert timeline.busy(0) == 1.0
    assert timeline.bubble_ratio == 0.75
