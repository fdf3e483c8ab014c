"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Tested in report/test_figure.py.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from ..files.writing import written_whole
from ..schedule import CHUNK_KINDS, COMPUTE_KINDS, Action, Kind, Timeline
from ..schedule.dependencies import message_needed, outcome

# Perfetto ties an arrow to the slices at its ends, so it leaves just before the sender's slice ends.
_INSIDE = 0.99


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """The Trace Event Format: a process per rank, a complete event per action, in microseconds; costs without a unit
    become milliseconds. Arrows lead from the sender of a message to its receiver. A counter shows the activations of a
    rank, in tokens if `meta["segment_lengths"]` has the lengths of the segments, else in units."""
    scale = 1e6 if timeline.time_unit == "s" else 1e3
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.ranks):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        # A row for each lane beside compute, since what overlaps cannot share a row.
        lanes = sorted({_lane_of(action) for action, _, _ in spans if action.kind not in COMPUTE_KINDS})
        events += (_name("thread_name", rank, row, name) for row, name in enumerate(lanes, start=1))
        for action, start, end in spans:
            row = 0 if action.kind in COMPUTE_KINDS else lanes.index(_lane_of(action)) + 1
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": row,
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
        events += _held(timeline, rank, scale)
    events += _arrows(timeline, scale)
    return {"traceEvents": events, "otherData": dict(timeline.meta)}


def _lane_of(action: Action) -> str:
    lane = action.kind.facts.lane.value
    return f"{lane} of stage {action.stage}" if action.kind in CHUNK_KINDS else lane


def _name(what: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": {"name": name}}


def _held(timeline: Timeline, rank: int, scale: float) -> Iterator[dict[str, Any]]:
    """The counter of a rank: a unit of a model chunk is held from its F to its B or W."""
    lengths = timeline.meta.get("segment_lengths")
    changes = []
    for action, start, end in timeline.ranks[rank]:
        size = 1 if lengths is None else lengths[action.segment]
        if action.kind is Kind.F:
            changes.append((start, size))
        elif action.kind.facts.gives_weight_gradient:
            changes.append((end, -size))
    held = 0
    for moment, change in sorted(changes):
        held += change
        args = {"units" if lengths is None else "tokens": held}
        yield {"ph": "C", "pid": rank, "name": "activations", "ts": (moment - timeline.start) * scale, "args": args}


def _arrows(timeline: Timeline, scale: float) -> Iterator[dict[str, Any]]:
    """An arrow for each message: two events of one number, at the sender's slice and at the receiver's."""
    slices = {}
    for rank, spans in enumerate(timeline.ranks):
        for span in spans:
            slices[outcome(span.action)] = rank, span
    numbers = count(1)
    for action, (rank, span) in slices.items():
        needed = message_needed(action, timeline.shape) if action.kind in COMPUTE_KINDS else None
        if needed in slices:
            there, sent = slices[needed]
            leaves = sent.start + _INSIDE * (sent.end - sent.start)
            common = {"id": next(numbers), "name": "message", "cat": "message", "tid": 0}
            yield {"ph": "s", "pid": there, "ts": (leaves - timeline.start) * scale, **common}
            yield {"ph": "f", "bp": "e", "pid": rank, "ts": (span.start - timeline.start) * scale, **common}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(to_trace(timeline)) + "\n", encoding="utf-8")
