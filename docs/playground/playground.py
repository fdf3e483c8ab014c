"""What the playground shows: this file runs in the browser, with the schedules of the package.

Times are in forwards of a whole sequence through the layers of one rank, memory in whole sequences on one rank.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

from megatron.seq1f1b.report.style import BOXES, shade
from megatron.seq1f1b.schedule import Costs, Kind, Placement, Schedule, Shape, build, peak_memory, simulate

CUTS = ("balanced", "even")
MOST_ACTIONS = 12_000  # a browser plans and draws this many in seconds


@dataclass(frozen=True)
class Settings:
    """The values of the sliders.

    `attention` is its share of the forward of a whole sequence, `message` the time in which the activations of a whole
    sequence reach the next rank, `memory` what `auto` may hold, in peaks of 1F1B with the same segments.
    """

    family: str = "1f1b"
    ranks: int = 4
    microbatches: int = 4
    segments: int = 4
    chunks: int = 1
    placement: str = "looped"
    cut: str = "balanced"
    attention: float = 0.3
    message: float = 0.0
    memory: float = 1.0

    def __post_init__(self) -> None:
        if self.cut not in CUTS:
            raise ValueError(f"unknown cut {self.cut!r}; there are {', '.join(CUTS)}")
        if not 0 <= self.attention < 1 or self.message < 0 or self.memory < 1:
            raise ValueError("the attention's share is below 1, a message takes no negative time, memory is 1 or more")
        actions = 3 * self.ranks * self.chunks * self.microbatches * self.segments
        if actions > MOST_ACTIONS:
            raise ValueError(
                f"{actions:,} actions are too many for a page, which draws {MOST_ACTIONS:,}: take fewer segments, "
                "ranks, micro-batches or model chunks"
            )

    @property
    def shape(self) -> Shape:
        return Shape(Placement(self.ranks, self.chunks, self.placement), self.microbatches, self.segments)


def cut(settings: Settings) -> list[float]:
    """Where the segments end, as parts of the sequence.

    The forward of the first part c of a sequence takes (1 - a)·c + a·c² of that of the whole, where attention takes a.
    """
    a = settings.attention
    ends = [j / settings.segments for j in range(settings.segments + 1)]
    if settings.cut == "even" or a == 0:
        return ends
    return [(sqrt((1 - a) ** 2 + 4 * a * time) - (1 - a)) / (2 * a) for time in ends]


def costs(settings: Settings) -> dict[str, list[float]]:
    """Costs of the actions by segments, as `Costs.from_mapping` and `seq1f1b plot --costs` take them.

    The backward of attention takes twice its forward, without W; matrix products have I and W. Rounded, since people
    copy them.
    """
    ends = cut(settings)
    lengths = [end - start for start, end in pairwise(ends)]
    products = [(1 - settings.attention) * length / settings.chunks for length in lengths]
    attention = [settings.attention * (end**2 - start**2) / settings.chunks for start, end in pairwise(ends)]
    exact = {
        "f": [p + a for p, a in zip(products, attention, strict=True)],
        "i": [p + 2 * a for p, a in zip(products, attention, strict=True)],
        "w": products,
        "message": [settings.message * length for length in lengths],
        "activation": [length / settings.chunks for length in lengths],
    }
    return {name: [round(value, 6) for value in values] for name, values in exact.items()}


def memory_limit(settings: Settings, given: Costs) -> float | None:
    """What `auto` may hold on a rank, in whole sequences; None for other families."""
    if settings.family != "auto":
        return None
    return round(settings.memory * max(peak_memory(build("1f1b", settings.shape), given)), 9)


def plain_1f1b(settings: Settings) -> list[dict[str, Any]]:
    """The panel of 1F1B with whole sequences, for comparison; none where the settings are that."""
    if (settings.family, settings.segments, settings.chunks) == ("1f1b", 1, 1):
        return []
    plain = Settings(ranks=settings.ranks, microbatches=settings.microbatches, segments=1, message=settings.message)
    given = Costs.from_mapping(plain.shape, costs(plain))
    return [_panel("1f1b", build("1f1b", plain.shape), given)]


def _panel(name: str, schedule: Schedule, given: Costs) -> dict[str, Any]:
    timeline = simulate(schedule, given)
    shape = schedule.shape
    return {
        "name": name,
        "segments": shape.num_segments,
        "chunks": shape.num_chunks,
        "time": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "memory": peak_memory(schedule, given),
        # For each rank: kind, model chunk, micro-batch, segment, start, end.
        "ranks": [
            [
                [action.kind.value, shape.placement.chunk_of(action.stage), *action[2:], start, end]
                for action, start, end in spans
            ]
            for spans in timeline.ranks
        ],
        "colours": {kind.value: _shades(kind, shape.num_segments) for kind in BOXES},
    }


def _shades(kind: Kind, num_segments: int) -> Sequence[str]:
    return [shade(kind, segment, num_segments) for segment in range(num_segments)]


def answer(question: str) -> str:
    """The panels for a JSON object of settings, as JSON: the schedule of the settings and 1F1B for comparison, with the
    costs and the memory limit that `seq1f1b plot` needs to draw the first; `error` holds a sentence where there are
    none."""
    try:
        settings = Settings(**json.loads(question))
        by_name = costs(settings)
        given = Costs.from_mapping(settings.shape, by_name)
        limit = memory_limit(settings, given)
        ours = _panel(settings.family, build(settings.family, settings.shape, given, limit), given)
        return json.dumps(
            {
                "panels": [ours, *plain_1f1b(settings)],
                "looks": {kind: {"name": look.name, "number": look.number} for kind, look in BOXES.items()},
                "costs": by_name,
                "limit": limit,
            }
        )
    except ValueError as error:
        return json.dumps({"error": str(error)})
