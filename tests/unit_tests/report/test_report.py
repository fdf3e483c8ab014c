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


def test_what_overlaps_with_compute_has_rows_of_its_own():
    """Collectives of two chunks overlap with each other, copies of one direction do not."""
    beside = [Action(Kind.GATHER, 2), Action(Kind.REDUCE, 0)]
    beside += [Action(kind, 0, unit, 0) for kind in (Kind.OFFLOAD, Kind.RELOAD) for unit in (0, 1)]
    spans = tuple(Span(action, 0.0, 1.0) for action in (Action(Kind.F, 0, 0, 0), *beside))
    events = to_trace(Timeline(Shape(Placement(1, 3), 2), (spans,), "s"))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = [names.get(event["tid"]) for event in events if event["ph"] == "X"]
    copies = [f"copies {way} the host" for way in ("to", "to", "from", "from")]
    assert rows == [None, "collectives of stage 2", "collectives of stage 0", *copies]


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
        found = next(each for each in here if each["ts"] <= end["ts"] < each["ts"] + each["dur"])
        return found["cat"], found["pid"], *found["args"].values()

    for number, left in ends["s"].items():
        (_, source, stage, _, *unit), (kind, rank, other, _, *received) = slice_at(left), slice_at(ends["f"][number])
        assert other == stage + (1 if kind == "F" else -1) and source != rank and unit == received


def test_a_counter_shows_what_ranks_hold():
    plain = simulate(build("1f1b", Shape(Placement(2), 3, 2)))
    in_tokens = Timeline(plain.shape, plain.ranks, "s", {"segment_lengths": [500, 500]})
    for timeline, unit, of_sequence in ((plain, "units", 2), (in_tokens, "tokens", 1000)):
        events = [event for event in to_trace(timeline)["traceEvents"] if event["ph"] == "C"]
        for rank, spans in enumerate(plain.ranks):
            held = [event["args"][unit] for event in events if event["pid"] == rank]
            sequences = sequences_held((span.action for span in spans), plain.shape)
            assert max(held) == of_sequence * sequences and held[-1] == 0
