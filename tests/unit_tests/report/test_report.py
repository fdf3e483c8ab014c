import re

import pytest

from megatron.seq1f1b.report import plot_timelines, to_trace
from megatron.seq1f1b.schedule import (
    Action,
    Kind,
    Placement,
    Shape,
    Span,
    Timeline,
    build,
    sequences_held,
    simulate,
)


def test_a_figure_shows_sizes_bubble_peaks_and_every_micro_batch(tmp_path):
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    timeline = simulate(build("zb-h1", Shape(Placement(4, 2), 3, 2)))
    titled = Timeline(timeline.shape, timeline.ranks, meta={"schedule": "zb-h1"})
    plot_timelines([titled, titled], tmp_path / "two.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "two.svg").read_text())
    titles = [text for text in texts if text.startswith("zb-h1 ")]
    assert len(titles) == 2
    assert f"bubble ratio {timeline.bubble_ratio:.3f}" in titles[0]
    assert "P = 4, m = 3, k = 2, C = 2 (looped)" in titles[0]
    # Two panels; 3 kinds, 8 stages, 2 segments for each micro-batch; axis ticks add a few.
    assert texts.count("1") >= 2 * 3 * 8 * 2
    assert {"forward", "input gradient", "weight gradient", "rank 3"} <= set(texts)
    assert "backward" not in texts


def test_timelines_of_different_units_do_not_share_an_axis(tmp_path):
    timeline = simulate(build("1f1b", Shape(Placement(2), 2)))
    measured = Timeline(timeline.shape, timeline.ranks, "s")
    with pytest.raises(ValueError, match="different time units"):
        plot_timelines([timeline, measured], tmp_path / "x.png")


def test_trace_events():
    timeline = simulate(build("1f1b", Shape(Placement(2), 1)))
    events = to_trace(Timeline(timeline.shape, timeline.ranks, "s"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["rank 0", "rank 1"]
    first = next(event for event in events if event["name"] == "1F0.0")
    assert (first["pid"], first["ts"], first["dur"]) == (1, 1e6, 1e6)
    assert first["args"] == {"stage": 1, "chunk": 0, "microbatch": 0, "segment": 0}


def test_collectives_have_rows_of_their_own_in_a_trace():
    """They overlap with compute, and those of two chunks with each other."""
    compute = Span(Action(Kind.F, 0, 0, 0), 0.0, 1.0)
    collectives = [Span(Action(Kind.GATHER, 2), 0.0, 2.0), Span(Action(Kind.REDUCE, 0), 1.0, 3.0)]
    timeline = Timeline(Shape(Placement(1, 3), 1), ((compute, *collectives),), "s")
    events = {event["name"]: event for event in to_trace(timeline)["traceEvents"]}
    assert [events[name]["tid"] for name in ("0F0.0", "0REDUCE", "2GATHER")] == [0, 1, 2]
    assert events["thread_name"]["args"] == {"name": "collectives of stage 2"}


def test_copies_have_a_row_for_each_direction_in_a_trace():
    actions = (Action(kind, 0, unit, 0) for kind in (Kind.OFFLOAD, Kind.RELOAD) for unit in (0, 1))
    spans = tuple(Span(action, 0.0, 1.0) for action in (Action(Kind.F, 0, 0, 0), *actions))
    events = to_trace(Timeline(Shape(Placement(1), 2), (spans,), "s"))["traceEvents"]
    assert [event["tid"] for event in events if event["ph"] == "X"] == [0, 2, 2, 1, 1]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "copies from the host", 2: "copies to the host"}


@pytest.mark.parametrize("family, chunks", [("1f1b", 1), ("zb-h1", 2)])
def test_arrows_lead_from_every_send_to_its_receive(family, chunks):
    timeline = simulate(build(family, Shape(Placement(3, chunks), 4, 2)))
    events = to_trace(timeline)["traceEvents"]
    ends = {kind: {event["id"]: event for event in events if event["ph"] == kind} for kind in "sf"}
    # Forwards and backwards, one message each between any two neighbouring stages.
    assert len(ends["s"]) == len(ends["f"]) == 2 * (3 * chunks - 1) * 4 * 2
    slices = [event for event in events if event["ph"] == "X"]

    def slice_at(end):
        here = (each for each in slices if each["pid"] == end["pid"])
        return next(each for each in here if each["ts"] <= end["ts"] < each["ts"] + each["dur"])

    for number, left in ends["s"].items():
        sender, receiver = slice_at(left), slice_at(ends["f"][number])
        step = 1 if receiver["cat"] == "F" else -1
        assert receiver["args"]["stage"] == sender["args"]["stage"] + step and sender["pid"] != receiver["pid"]
        units = [(each["args"]["microbatch"], each["args"]["segment"]) for each in (sender, receiver)]
        assert units[0] == units[1]


def test_a_counter_shows_what_ranks_hold():
    plain = simulate(build("1f1b", Shape(Placement(2), 3, 2)))
    timeline = Timeline(plain.shape, plain.ranks, "s", {"segment_lengths": [600, 400]})

    def counted(timeline, rank, unit):
        events = to_trace(timeline)["traceEvents"]
        return [event["args"][unit] for event in events if event["ph"] == "C" and event["pid"] == rank]

    for rank, spans in enumerate(plain.ranks):
        assert max(counted(plain, rank, "units")) == 2 * sequences_held((span.action for span in spans), plain.shape)
        tokens = counted(timeline, rank, "tokens")
        assert max(tokens) >= 1000 and tokens[-1] == 0
