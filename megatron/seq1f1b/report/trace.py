"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import json
from pathlib import Path
from typing import Any

from ..schedule import Kind, Timeline


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """The Trace Event Format: a process per rank, a complete event per action, in microseconds.

    Seconds are scaled to microseconds; costs without a unit are shown as milliseconds each.
    """
    scale = 1e6 if timeline.time_unit == "s" else 1e3
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.ranks):
        events.append(
            {"ph": "M", "pid": rank, "tid": 0, "name": "process_name",
             "args": {"name": f"rank {rank}"}}
        )  # fmt: skip
        chunks = {action.stage for action, _, _ in spans if action.kind in (Kind.GATHER, Kind.REDUCE)}
        rows = {stage: row for row, stage in enumerate(sorted(chunks), start=1)}
        for stage, row in rows.items():
            events.append(
                {"ph": "M", "pid": rank, "tid": row, "name": "thread_name",
                 "args": {"name": f"collectives of stage {stage}"}}
            )  # fmt: skip
        for action, start, end in spans:
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    # Beside compute, and on a row for each stage: what overlaps cannot share one.
                    "tid": rows[action.stage] if action.kind in (Kind.GATHER, Kind.REDUCE) else 0,
                    "name": str(action),
                    "cat": action.kind.value,
                    "ts": (start - timeline.start) * scale,
                    "dur": (end - start) * scale,
                    "args": {
                        "stage": action.stage,
                        "chunk": timeline.shape.placement.chunk_of(action.stage),
                        "microbatch": action.microbatch,
                        "segment": action.segment,
                    },
                }
            )
    return {"traceEvents": events, "otherData": dict(timeline.meta)}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    Path(path).write_text(json.dumps(to_trace(timeline)) + "\n", encoding="utf-8")
