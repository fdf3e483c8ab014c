"""Timelines as JSON: simulated ones, and traces of a run.

Tested in commands/test_bad_input.py by test_one_sentence.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from ..schedule import CHUNK_KINDS, Action, Kind, Placement, Shape, Span, Timeline
from .typed import Count, NonNegative, converted, read_json, with_way_out
from .writing import written_whole

_WAY_OUT = "--pipeline-trace writes timelines"
_Number = Annotated[int, Meta(ge=0, lt=10**12)]
_Moment = Annotated[float, Meta(gt=-1e30, lt=1e30)]
_Unit = Annotated[int, Meta(ge=-1, lt=10**12)]  # -1: of a whole model chunk


class _Row(Struct, forbid_unknown_fields=True):
    kind: Kind
    stage: _Number
    start: _Moment
    end: _Moment
    microbatch: _Unit = -1
    segment: _Unit = -1
    chunk: _Number = 0


class _Sizes(Struct):
    """The values that the `meta` of every timeline has, beside others."""

    num_ranks: Count
    num_chunks: Count
    placement: Literal["looped", "v"]
    num_microbatches: Count
    num_segments: Count
    unequal_segments: list[Count] = []
    time_unit: Literal["", "s"] = ""


class _Meta(_Sizes):
    schedule: str = ""
    segment_lengths: list[Count] | None = None


class _File(Struct, forbid_unknown_fields=True):
    meta: dict[str, Any]
    ranks: list[list[_Row]]


class Trace(Struct):
    """What --pipeline-trace writes into the `meta` of a timeline."""

    schedule: str
    iteration: Count
    peak_memory_bytes: list[NonNegative]


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write `{"meta": {...}, "ranks": [[{"kind": "F", "stage": 0, ..., "start": 0.0, "end": 1.0}]]}`."""
    shape = timeline.shape
    placement = shape.placement
    meta = {
        **timeline.meta,
        "num_ranks": placement.num_ranks,
        "num_chunks": placement.num_chunks,
        "placement": placement.style,
        "num_microbatches": shape.num_microbatches,
        "num_segments": shape.num_segments,
        "unequal_segments": shape.unequal,
        "time_unit": timeline.time_unit,
    }
    ranks = [[_row_of(span, placement) for span in spans] for spans in timeline.ranks]
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps({"meta": meta, "ranks": ranks}) + "\n", encoding="utf-8")


def _row_of(span: Span, placement: Placement) -> dict[str, Any]:
    action, start, end = span
    return {**action._asdict(), "chunk": placement.chunk_of(action.stage), "start": start, "end": end}


def read_timeline(path: str | Path) -> Timeline:
    """The inverse of `write_timeline`. Raises ValueError, with the name of the file, if it is no timeline."""
    try:
        file = read_json(path, _File)
        sizes = converted(path, file.meta, _Meta, "meta.")
        placement = Placement(sizes.num_ranks, sizes.num_chunks, sizes.placement)
        shape = Shape(placement, sizes.num_microbatches, sizes.num_segments, tuple(sizes.unequal_segments))
        if sizes.num_ranks != len(file.ranks) or len(shape.unequal) not in (0, sizes.num_microbatches):
            raise ValueError(f"{path}: it has {len(file.ranks)} ranks, and its sizes are those of {shape}")
        if sizes.segment_lengths is not None and len(sizes.segment_lengths) != sizes.num_segments:
            raise ValueError(f"{path}: meta.segment_lengths: expected {sizes.num_segments} lengths")
        ranks = tuple(tuple(map(_span, rows)) for rows in file.ranks)
        for span in chain(*ranks):
            if fault := _fault(span, shape):
                raise ValueError(f"{path}: {fault}")
    except ValueError as error:
        raise with_way_out(error, _WAY_OUT) from None
    of_shape = {field.name for field in structs.fields(_Sizes)}
    meta = {name: value for name, value in file.meta.items() if name not in of_shape}
    return Timeline(
        shape=shape,
        ranks=ranks,
        time_unit=sizes.time_unit,
        meta=meta,
    )


def read_trace(path: str | Path) -> tuple[Timeline, Trace]:
    """The timeline of a run with what --pipeline-trace writes beside it; raises ValueError, too, if it lacks that."""
    timeline = read_timeline(path)
    trace = converted(path, timeline.meta, Trace, "meta.")
    if len(trace.peak_memory_bytes) != len(timeline.ranks):
        raise ValueError(f"{path}: meta.peak_memory_bytes: expected a number for each of {len(timeline.ranks)} ranks")
    if timeline.makespan <= 0:
        raise ValueError(f"{path}: its step takes no time; {_WAY_OUT}")
    return timeline, trace


def _span(row: _Row) -> Span:
    return Span(Action(row.kind, row.stage, row.microbatch, row.segment), row.start, row.end)


def _fault(span: Span, shape: Shape) -> str:
    """The fault of a span in words, empty if it has none."""
    (kind, stage, microbatch, segment), start, end = span
    is_unit = 0 <= microbatch < shape.num_microbatches and 0 <= segment < shape.segments_of(microbatch)
    is_of_chunk = kind in CHUNK_KINDS and (microbatch, segment) == (-1, -1)
    if not 0 <= stage < shape.num_stages or not (is_unit or is_of_chunk):
        return f"{span.action} is not of {shape}"
    if start > end:
        return f"{span.action} lasts from {start} to {end}"
    return ""
