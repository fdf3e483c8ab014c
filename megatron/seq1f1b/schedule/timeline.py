"""When each action ran: one form for simulated and measured steps, and its JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from .action import CHUNK_KINDS, COMPUTE_KINDS, Action, Kind
from .files import UNUSABLE, read_json, reason, written_whole
from .schedule import Placement, Shape


class Span(NamedTuple):
    """An action with its start and end, in `Timeline.time_unit` since the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """For each rank, its spans in the order of their start.

    `time_unit` is "s" for measured and estimated times, "" for costs without a unit. `meta` holds anything that JSON
    can, such as the name of the schedule.
    """

    shape: Shape
    ranks: tuple[tuple[Span, ...], ...]
    time_unit: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> float:
        return min(span.start for spans in self.ranks for span in spans)

    @property
    def end(self) -> float:
        return max(span.end for spans in self.ranks for span in spans)

    @property
    def makespan(self) -> float:
        """From the first start to the last end on any rank."""
        return self.end - self.start

    def busy(self, rank: int) -> float:
        """Time that the rank spends in compute actions (F, B, I, W)."""
        return sum(span.end - span.start for span in self.ranks[rank] if span.action.kind in COMPUTE_KINDS)

    @property
    def bubble_ratio(self) -> float:
        """Idle time of all ranks over their total time, from step start to step end."""
        total = len(self.ranks) * self.makespan
        busy = sum(self.busy(rank) for rank in range(len(self.ranks)))
        # Sums of floats are not exact: who never idles may seem to do more.
        return max(0.0, total - busy) / total if total else 0.0

    @property
    def longest_stretch(self) -> float:
        """The longest time that a rank takes from its own first action to its last."""
        return max((spans[-1].end - spans[0].start for spans in self.ranks if spans), default=0.0)


def to_json(timeline: Timeline) -> dict[str, Any]:
    """`{"meta": {...}, "ranks": [[{"kind": "F", "stage": 0, ..., "start": 0.0, "end": 1.0}]]}`."""
    shape, placement = timeline.shape, timeline.shape.placement
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
    ranks = [
        [
            {**action._asdict(), "chunk": placement.chunk_of(action.stage), "start": start, "end": end}
            for action, start, end in spans
        ]
        for spans in timeline.ranks
    ]
    return {"meta": meta, "ranks": ranks}


def from_json(data: Mapping[str, Any]) -> Timeline:
    """The inverse of `to_json`. Raises one of UNUSABLE if `data` is no timeline."""
    meta = dict(data["meta"])
    sizes = {name: meta.pop(f"num_{name}") for name in ("ranks", "chunks", "microbatches", "segments")}
    count = sum(map(len, data["ranks"]))
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= count:
            raise ValueError(f"num_{name} is {size}, which its {count} actions cannot have")
    placement = Placement(sizes["ranks"], sizes["chunks"], meta.pop("placement"))
    shape = Shape(placement, sizes["microbatches"], sizes["segments"])
    unequal = meta.pop("unequal_segments", ())
    if unequal:
        if {*map(type, unequal)} != {int} or (len(unequal), max(unequal)) != (sizes["microbatches"], sizes["segments"]):
            raise ValueError(f"unequal_segments {unequal} are not of {shape}")
        shape = Shape.of(placement, unequal)
    if len(data["ranks"]) != shape.num_ranks:
        raise ValueError(f"num_ranks is {shape.num_ranks}, but there are {len(data['ranks'])}")
    ranks = tuple(tuple(map(_span, rows)) for rows in data["ranks"])
    for action, start, end in (span for spans in ranks for span in spans):
        if not _is_of(shape, action):
            raise ValueError(f"{action} is not of {shape}")
        if not -inf < start <= end < inf or end - start == inf:
            raise ValueError(f"{action} lasts from {start} to {end}")
    return Timeline(shape, ranks, meta.pop("time_unit", ""), meta)


def _span(row: Mapping[str, Any]) -> Span:
    action = Action(Kind(row["kind"]), row["stage"], row["microbatch"], row["segment"])
    return Span(action, row["start"], row["end"])


def _is_of(shape: Shape, action: Action) -> bool:
    _, *numbers = action
    if not all(type(number) is int for number in numbers) or not 0 <= action.stage < shape.num_stages:
        return False
    if action.kind in CHUNK_KINDS:
        return action.microbatch == action.segment == -1
    _, _, microbatch, segment = action
    return 0 <= microbatch < shape.num_microbatches and 0 <= segment < shape.segments_of(microbatch)


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(to_json(timeline)) + "\n", encoding="utf-8")


def read_timeline(path: str | Path) -> Timeline:
    """Raises ValueError, with the name of the file, if it is no timeline."""
    data = read_json(path)
    try:
        return from_json(data)
    except UNUSABLE as error:
        raise ValueError(f"{path} is no timeline: {reason(error)}; --pipeline-trace writes them") from error
