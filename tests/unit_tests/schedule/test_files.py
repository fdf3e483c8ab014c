import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.schedule import (
    FAMILIES,
    Action,
    Costs,
    Kind,
    Placement,
    ScheduleError,
    Shape,
    Span,
    Timeline,
    build,
    read_csv,
    read_timeline,
    simulate,
    write_csv,
    write_timeline,
)

from .strategies import fixed, shapes


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes(ranks=4, microbatches=4, segments=3, chunks=3))
def test_csv_out_and_in(tmp_path_factory, family, shape):
    path = tmp_path_factory.mktemp("csv") / "schedule.csv"
    schedule = build(family, shape)
    write_csv(schedule, path)
    again = read_csv(path)
    assert again.ranks == schedule.ranks
    # The file does not show which one it is where a V and a loop are the same.
    assert (again.shape == shape) or not shape.placement.turns or shape.num_ranks == 1


def test_csv_of_other_programs(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,,0F1,0B0,0B1\r\n,1F0,1B0,1F1,1I1,1W1\r\n", encoding="utf-8-sig")
    schedule = read_csv(path)
    assert schedule.shape == Shape(Placement(2), 2, 1)
    assert schedule.ranks[1][-1] == Action(Kind.W, 1, 1, 0)


@pytest.mark.parametrize(
    "text, error, message",
    [
        ("", ValueError, "holds no actions"),
        ("0F0.0,0Q0.0", ValueError, "row 1, cell 2: not an action: '0Q0.0'"),
        ("0F0.0,0B0.0,0REDUCE", ValueError, "row 1, cell 3: '0REDUCE' is not F, B, I, W, OFFLOAD or RELOAD"),
        ("0F0.0,0B0.0\n1F0.0,1B0.0,2F0.0,2B0.0", ValueError, "3 stages do not divide evenly over 2 rows"),
        ("0F0.0,0F0.1,0B0.0,0B0.1", ScheduleError, "segments go backward in descending order"),
        ("0F0.0,0F1.0,0B0.0", ScheduleError, "stage 0, micro-batch 1, segment 0 has no backward"),
        (
            "0F0.0,0B0.0,0F999999999.0",
            ValueError,
            "1000000000 micro-batches, 1 segments, more than its 3 actions can be",
        ),
        ("0F0.0,0F" + "9" * 5000, ValueError, "row 1, cell 2: not an action: '0F9999"),
        ("0F0.0," + "x" * 140000, ValueError, "line 1: field larger than field limit"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_bad_csv_is_named_with_the_place(tmp_path, text, error, message):
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    with pytest.raises(error) as caught:
        read_csv(path)
    assert message in str(caught.value) and str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("read", [read_csv, read_timeline])
def test_a_file_that_is_none_is_named(tmp_path, read):
    (tmp_path / "latin").write_bytes(b"\xe9,0F0.0")
    for name, why in (("missing", "No such file"), (".", "Is a directory"), ("latin", "it is not UTF-8 text")):
        with pytest.raises(ValueError, match=why) as caught:
            read(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


SPAN = {"kind": "F", "stage": 0, "microbatch": 0, "segment": 0, "start": 0.0, "end": 1.0}
META = {"num_ranks": 1, "num_chunks": 1, "placement": "looped", "num_microbatches": 1, "num_segments": 1}


@pytest.mark.parametrize(
    "content, why",
    [
        ("no JSON", "it is not JSON"),
        ({"meta": META}, "it has no 'ranks'"),
        ({"meta": META, "ranks": [[SPAN], [SPAN]]}, "num_ranks is 1, but there are 2"),
        ({"meta": {**META, "num_chunks": 1.5}, "ranks": [[SPAN]]}, "num_chunks is 1.5"),
        ({"meta": META, "ranks": [[{**SPAN, "start": "early"}]]}, "a value in it is of the wrong type"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_a_file_that_holds_no_timeline_is_named_with_the_reason(tmp_path, content, why):
    path = tmp_path / "timeline.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as caught:
        read_timeline(path)
    assert why in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    "value", [[], [[]], "much", None, {"0": 1}, 10**400, float("nan"), float("inf"), [1, "x"]], ids=str
)
def test_a_cost_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="cost table 'f'"):
        Costs.from_mapping(Shape(Placement(1), 1, 2), {"f": value})
    with pytest.raises(ValueError, match="table of names and numbers"):
        Costs.from_mapping(Shape(Placement(1), 1, 2), [value])


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes(ranks=3, microbatches=3, segments=3, chunks=2))
def test_timeline_out_and_in(tmp_path_factory, family, shape):
    path = tmp_path_factory.mktemp("json") / "timeline.json"
    simulated = simulate(build(family, shape), Costs.uniform(shape, 0.1, 0.2, 0.3, 0.01))
    timeline = Timeline(shape, simulated.ranks, "s", {"schedule": family})
    write_timeline(timeline, path)
    assert read_timeline(path) == timeline
    data = json.loads(path.read_text())
    assert data["meta"]["num_ranks"] == shape.num_ranks and data["meta"]["schedule"] == family
    assert data["ranks"][0][0] == {**SPAN, "chunk": 0, "end": 0.1}


def test_idle_time_of_a_timeline():
    spans = (Span(Action(Kind.F, 0, 0, 0), 10.0, 11.0), Span(Action(Kind.REDUCE, 0), 11.0, 14.0))
    timeline = Timeline(Shape(Placement(1), 1), (spans,))
    assert timeline.makespan == 4.0
    assert timeline.busy(0) == 1.0
    assert timeline.bubble_ratio == 0.75
