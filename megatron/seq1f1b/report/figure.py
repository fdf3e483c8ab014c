"""Timelines as a figure in the manner of the papers: a row for each rank, time to the right.

The colour of a box stands for the kind of action, its shade for the segment (dark is late), its number for the
micro-batch, the bar below it for the model chunk; idle time stays white. The two actions of a pair share the height of
a row, the forward above. Lines above a row are collectives, which gather parameters (hollow) or reduce gradients
(filled); below it are copies to the host (filled) or back (hollow).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..schedule import MOVE_KINDS, Kind, Timeline, sequences_held
from .style import BOXES, LINES, picture, shade, write_right

# The name in the papers, by family, whether there are several segments, and whether there are several chunks.
_PAPERS = {
    ("gpipe", False, False): "GPipe",
    ("gpipe", True, False): "TeraPipe",
    ("1f1b", False, False): "1F1B",
    ("1f1b", False, True): "interleaved 1F1B",
    ("1f1b", True, False): "Seq1F1B",
    ("1f1b", True, True): "Seq1F1B-I",
    ("zb-h1", False, False): "ZB-H1",
    ("zb-h1", True, False): "Seq1F1B + ZB-H1",
}
_DARK = "#404040"
_NARROW = 5.0  # inches; a narrower figure, one column of a paper, has no room for the table at the right


def plot_timelines(
    timelines: Sequence[Timeline], path: str | Path, width: float = 8.0, has_labels: bool = True
) -> None:
    """Write one panel for each timeline, all on one time axis, to a .png, .svg or .pdf file. Needs matplotlib.

    In a figure of at least 5 inches, the right margin of a panel shows the most sequences that each rank holds (see
    `sequences_held`) and its bubble ratio. Boxes have numbers where these fit, unless `has_labels=False`.
    Raises ValueError for timelines of different time units.
    """
    if len({timeline.time_unit for timeline in timelines}) > 1:
        raise ValueError("timelines of different time units cannot share an axis")
    longest = max(timeline.makespan for timeline in timelines)
    num_ranks = [len(timeline.ranks) for timeline in timelines]
    margin = 1.5 if width >= _NARROW else 0.4  # inches
    with picture(path, width, 0.28 * sum(num_ranks) + 0.45 * len(timelines) + 0.5) as figure:
        panels = figure.subplots(len(timelines), squeeze=False, height_ratios=num_ranks)[:, 0]
        for axes, timeline in zip(panels, timelines, strict=True):
            axes.set_xlim(0, longest * 1.002)  # the last edge shows
            _draw(axes, timeline, (width - margin) / longest if has_labels else 0.0)
            if width >= _NARROW:
                write_right(axes, [_numbers_of(timeline, rank) for rank in range(len(timeline.ranks))])
                axes.text(1, 1, "sequences held, bubble", transform=axes.transAxes, ha="left", va="bottom")
        unit = timelines[0].time_unit
        panels[-1].set_xlabel(f"time [{unit}]" if unit else "time", labelpad=1)
        _add_legend(figure, timelines, max(2, int(width / 1.3)))


def _numbers_of(timeline: Timeline, rank: int) -> str:
    """The most sequences that a rank holds, and its bubble ratio."""
    held = sequences_held((span.action for span in timeline.ranks[rank]), timeline.shape)
    makespan = timeline.makespan
    bubble = 1 - timeline.busy(rank) / makespan if makespan else 0.0
    return f"{held:.2f}      {bubble:.3f}"


def _title(timeline: Timeline) -> str:
    shape = timeline.shape
    name = timeline.meta.get("schedule", "schedule")
    name = _PAPERS.get((name, shape.num_segments > 1, shape.num_chunks > 1), name)
    chunks = f", C = {shape.num_chunks} ({shape.placement.style})" if shape.num_chunks > 1 else ""
    k = f"{min(shape.unequal)} to {shape.num_segments}" if shape.unequal else shape.num_segments
    sizes = f"P = {shape.num_ranks}, m = {shape.num_microbatches}, k = {k}{chunks}"
    return f"{name}   {sizes}   bubble ratio {timeline.bubble_ratio:.3f}"


class _Area(NamedTuple):
    """A rectangle, and the colours of its edge and its face."""

    corners: list[tuple[float, float]]
    edge: str
    face: str
    edge_width: float


def _draw(axes: Any, timeline: Timeline, inches: float) -> None:
    """Boxes, with the numbers of their micro-batches where they fit, and lines; `inches` to a unit of time."""
    from matplotlib.collections import PolyCollection

    shape = timeline.shape
    boxes: list[_Area] = []
    lines: list[_Area] = []  # over the boxes
    for rank, spans in enumerate(timeline.ranks):
        paired = timeline.paired(rank)
        for action, start, end in spans:
            left = start - timeline.start
            right = end - timeline.start
            if action.kind in LINES:
                look = LINES[action.kind]
                top = rank + 0.42 if action.kind in MOVE_KINDS else rank - 0.5
                lines.append(_Area(_rectangle(left, right, top, top + 0.08), look.edge, look.face, edge_width=0.5))
                continue
            high = rank - 0.46
            low = rank + 0.46
            if action in paired and action.kind is Kind.F:
                low = rank
            elif action in paired:
                high = rank
            face = shade(action.kind, action.segment, shape.num_segments)
            boxes.append(_Area(_rectangle(left, right, high, low), _DARK, face, edge_width=0.3))
            text = str(action.microbatch)
            if (end - start) * inches >= 0.055 * len(text) + 0.02:
                axes.text(
                    (left + right) / 2,
                    (high + low) / 2,
                    text,
                    color=BOXES[action.kind].number,
                    fontsize=6,
                    ha="center",
                    va="center_baseline",
                    clip_on=True,
                )
            chunk = shape.placement.chunk_of(action.stage)
            if chunk > 0:
                bar = _rectangle(left, right, low - 0.16 * chunk / (shape.num_chunks - 1), low)
                boxes.append(_Area(bar, _DARK, _DARK, edge_width=0.0))
    areas = [*boxes, *lines]
    axes.add_collection(
        PolyCollection(
            [area.corners for area in areas],
            edgecolors=[area.edge for area in areas],
            facecolors=[area.face for area in areas],
            linewidths=[area.edge_width for area in areas],
        )
    )
    axes.set(ylim=(len(timeline.ranks) - 0.5, -0.5), yticks=range(len(timeline.ranks)))
    axes.set_ylabel("rank", labelpad=1)
    axes.tick_params(axis="y", length=0)
    axes.set_title(_title(timeline), pad=4, wrap=True)


def _rectangle(left: float, right: float, low: float, high: float) -> list[tuple[float, float]]:
    return [(left, low), (right, low), (right, high), (left, high)]


def _add_legend(figure: Any, timelines: Sequence[Timeline], num_columns: int) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    def box(face: str, edge: str = _DARK) -> Patch:
        return Patch(facecolor=face, edgecolor=edge, linewidth=0.5)

    used: set[Kind] = set()
    for timeline in timelines:
        for spans in timeline.ranks:
            used.update(span.action.kind for span in spans)
    entries: dict[str, Any] = {look.name: box(shade(kind, 1, 3)) for kind, look in BOXES.items() if kind in used}
    entries |= {look.name: box(look.face, look.edge) for kind, look in LINES.items() if kind in used}
    if any(timeline.shape.num_segments > 1 for timeline in timelines):
        entries["first to last segment"] = box(BOXES[Kind.F].light), box(BOXES[Kind.F].dark)
    if any(timeline.shape.num_chunks > 1 for timeline in timelines):
        entries["bar: later model chunk"] = box(_DARK)
    figure.legend(
        entries.values(),
        entries,
        loc="outside upper left",
        ncols=num_columns,
        columnspacing=1.0,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
