"""Figures: colours that everybody can distinguish, widths, labels that drop out. Traces for Perfetto."""

import re
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from megatron.seq1f1b.report import plot_timelines, to_trace
from megatron.seq1f1b.report.style import BOXES
from megatron.seq1f1b.schedule import (
    PAIRED,
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

# Linear RGB as seen without the cones for long, middle and short waves (Machado et al. 2009, severity 1).
DEFICIENCIES = {
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def linear(colour):
    parts = np.array([*bytes.fromhex(colour[1:])]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def test_in_grey_no_shade_is_one_of_another_kind_or_idle():
    weights = (0.2126, 0.7152, 0.0722)
    luminance = {kind: (linear(box.light) @ weights, linear(box.dark) @ weights) for kind, box in BOXES.items()}
    bands = sorted(sorted(116 * np.cbrt(shades) - 16) for shades in luminance.values())
    assert all(higher[0] - lower[1] >= 4 for lower, higher in pairwise(bands)), bands
    assert 1.05 / (luminance[Kind.F][0] + 0.05) >= 1.4, "the contrast of a forward with idle time"


@pytest.mark.parametrize("matrix", DEFICIENCIES.values(), ids=DEFICIENCIES)
def test_the_colour_blind_tell_any_two_kinds_apart(matrix):
    """As well as they tell greys apart whose CIE lightness differs by 10."""
    shades = [(box.light, box.dark) for box in BOXES.values()]
    seen = [[np.cbrt(np.maximum(0, matrix @ linear(shade))) for shade in both] for both in shades]
    for first, second in combinations(seen, 2):
        assert all(np.linalg.norm(one - other) >= 0.15 for one, other in product(first, second))


def texts(path, *timelines, **options):
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_timelines(timelines, path, **options)
    picture = path.read_text()
    inches = float(re.search(r'width="([\d.]+)pt"', picture)[1]) / 72
    return inches, re.findall(r"<text[^>]*>([^<]*)</text>", picture)


def test_a_figure_shows_sizes_bubble_peaks_and_every_micro_batch(tmp_path):
    timeline = simulate(build("zb-h1", Shape(Placement(4, 2), 3, 2)))
    titled = Timeline(timeline.shape, timeline.ranks, meta={"schedule": "zb-h1"})
    _, shown = texts(tmp_path / "two.svg", titled, titled)
    title, _ = (text for text in shown if text.startswith("zb-h1 "))
    assert f"bubble ratio {timeline.bubble_ratio:.3f}" in title and "P = 4, m = 3, k = 2, C = 2 (looped)" in title
    # Two panels; 3 kinds, 8 stages, 2 segments for each micro-batch; axis ticks add a few.
    assert shown.count("1") >= 2 * 3 * 8 * 2
    assert {"forward", "input gradient", "weight gradient", "sequences held, bubble"} <= set(shown)
    assert "backward" not in shown


def test_in_one_column_numbers_drop_out_where_they_do_not_fit(tmp_path):
    small = simulate(build("1f1b", Shape(Placement(2), 12)))
    large = simulate(build("zb-h1", Shape(Placement(8, 2, "v"), 12, 2)))
    inches, shown = texts(tmp_path / "a.svg", small, width=3.3)
    assert inches == pytest.approx(3.3) and shown.count("9") == 2, "of backwards, which are long enough"
    assert "11" not in texts(tmp_path / "a.svg", small, width=3.3, has_labels=False)[1]
    assert "11" not in texts(tmp_path / "a.svg", large, width=3.3)[1]
    inches, shown = texts(tmp_path / "a.svg", large, width=60)
    assert inches == pytest.approx(60) and shown.count("11") == 3 * 16 * 2
    assert texts(tmp_path / "a.svg", large)[0] == pytest.approx(8), "a page"


def test_the_two_of_a_pair_share_the_height_of_a_row(tmp_path):
    timeline = simulate(PAIRED["1f1b"](Shape(Placement(1), 2)).schedule())
    assert [str(action) for action in sorted(timeline.paired(0))] == ["0B0.0", "0F1.0"]
    with pytest.importorskip("matplotlib").rc_context({"svg.fonttype": "none"}):  # so that boxes alone have paths
        plot_timelines([timeline], tmp_path / "a.svg", has_labels=False)
    picture = (tmp_path / "a.svg").read_text()
    sides = re.findall(r'd="M [\d.]+ ([\d.]+) \nL [\d.]+ [\d.]+ \nL [\d.]+ ([\d.]+)', picture)
    heights = sorted(float(low) - float(high) for high, low in sides if float(low) > float(high))
    whole = heights[-1]
    assert heights == pytest.approx([whole / 2, whole / 2, whole, whole], abs=0.01)


def test_timelines_of_different_units_do_not_share_an_axis(tmp_path):
    timeline = simulate(build("1f1b", Shape(Placement(2), 2)))
    with pytest.raises(ValueError, match="different time units"):
        plot_timelines([timeline, Timeline(timeline.shape, timeline.ranks, "s")], tmp_path / "x.png")


def test_trace_events():
    timeline = simulate(build("1f1b", Shape(Placement(2), 1)))
    events = to_trace(Timeline(timeline.shape, timeline.ranks, "s"))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
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
