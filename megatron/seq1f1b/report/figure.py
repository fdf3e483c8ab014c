"""Timelines as a figure in the manner of the papers: a row for each rank, time to the right.

The colour of a box stands for the kind of action, its shade for the segment (dark is late), its number for the
micro-batch, the bar below it for the model chunk; idle time stays white. Lines beside a row run beside compute: above
it collectives, which gather parameters (hollow) or reduce gradients (filled), below it copies, to the memory of the
host (filled) or back (hollow).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..schedule import MOVE_KINDS, Kind, Span, Timeline, sequences_held, written_whole
from .colours import COLOURS, NAMES, shade

# Family, whether there are several segments, and several chunks: its name in the papers.
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
# Edge, face and name.
_LINES = {
    Kind.GATHER: ("#5e3c99", "white", "parameter gathering"),
    Kind.REDUCE: ("#b2182b", "#b2182b", "gradient reduction"),
    Kind.OFFLOAD: ("#35978f", "#35978f", "activations to the host"),
    Kind.RELOAD: ("#01665e", "white", "activations back"),
}
_ROW = 0.28  # inches: height of a rank
_WIDTH = 8.0  # inches: a page, at 200 dots an inch 1,600 pixels
_NARROW = 5.0  # inches: a figure of one column of a paper, which has no room for the table at the right
_MAX_LABELS = 6000  # more would be too small to read and slow to draw


def plot_timelines(
    timelines: Sequence[Timeline],
    path: str | Path,
    width: float = _WIDTH,
    has_labels: bool = True,
) -> None:
    """Write one panel for each timeline, all on one time axis, to a .png, .svg or .pdf file.

    The right margin of a panel shows, for each rank, the most sequences held (see `sequences_held`) and the idle share
    of the step, unless the figure is narrower than 5 inches. `width` is that of the figure in inches. Boxes that are
    too small have no number, and none has with `has_labels=False`. Needs matplotlib; raises ValueError for timelines of
    different time units.
    """
    from matplotlib.figure import Figure

    if len({timeline.time_unit for timeline in timelines}) > 1:
        raise ValueError("timelines of different time units cannot share an axis")
    longest = max(timeline.makespan for timeline in timelines)
    is_narrow = width < _NARROW
    left, right = (0.3, 0.1) if is_narrow else (0.65, 1.45)
    width -= left + right
    heights = [len(timeline.ranks) * _ROW for timeline in timelines]
    # Inches: between panels, for the legend, for the axis.
    gap, top, bottom = (0.35, 0.75, 0.35) if is_narrow else (0.5, 0.55, 0.4)
    height = sum(heights) + gap * (len(timelines) - 1) + top + bottom
    full = left + width + right
    figure = Figure(figsize=(full, height))

    above = top
    for timeline, panel in zip(timelines, heights, strict=True):
        axes = figure.add_axes((left / full, 1 - (above + panel) / height, width / full, panel / height))
        _draw(axes, timeline, longest, is_narrow)
        if has_labels:
            _label(axes, timeline, longest)
        above += panel + gap
    unit = timelines[0].time_unit
    axes.set_xlabel(f"time [{unit}]" if unit else "time", fontsize=7 if is_narrow else 8, labelpad=1)
    _add_legend(figure, timelines, height, columns=2 if is_narrow else 6)
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=300 if is_narrow else 200)


def _title(timeline: Timeline) -> str:
    shape = timeline.shape
    name = timeline.meta.get("schedule", "schedule")
    name = _PAPERS.get((name, shape.num_segments > 1, shape.num_chunks > 1), name)
    chunks = f", C = {shape.num_chunks} ({shape.placement.style})" if shape.num_chunks > 1 else ""
    k = f"{min(shape.unequal)} to {shape.num_segments}" if shape.unequal else shape.num_segments
    sizes = f"P = {shape.num_ranks}, m = {shape.num_microbatches}, k = {k}{chunks}"
    return f"{name}   {sizes}   bubble ratio {timeline.bubble_ratio:.3f}"


def _draw(axes: Any, timeline: Timeline, longest: float, is_narrow: bool) -> None:
    from matplotlib.collections import PolyCollection

    boxes, colours, bars, lines, line_colours, line_faces = [], [], [], [], [], []
    for rank, spans in enumerate(timeline.ranks):
        for action, start, end in spans:
            left, right = start - timeline.start, end - timeline.start
            if action.kind in _LINES:
                top = rank + 0.42 if action.kind in MOVE_KINDS else rank - 0.5
                lines.append(_rectangle(left, right, top, top + 0.08))
                edge, face, _ = _LINES[action.kind]
                line_colours.append(edge)
                line_faces.append(face)
                continue
            boxes.append(_rectangle(left, right, rank - 0.46, rank + 0.46))
            colours.append(shade(action.kind, action.segment, timeline.shape.num_segments))
            chunk = timeline.shape.placement.chunk_of(action.stage)
            if chunk:
                share = chunk / max(timeline.shape.num_chunks - 1, 1)
                bars.append(_rectangle(left, right, rank + 0.46 - 0.16 * share, rank + 0.46))
    outline = 0.15 if is_narrow else 0.3
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="#404040", linewidths=outline))
    axes.add_collection(PolyCollection(bars, facecolors="#404040", linewidths=0))
    axes.add_collection(
        PolyCollection(lines, facecolors=line_faces or "none", edgecolors=line_colours or "none", linewidths=0.5)
    )
    ranks = range(len(timeline.ranks))
    axes.set_xlim(0, longest * 1.002)  # the last edge shows
    axes.set_ylim(len(timeline.ranks) - 0.5, -0.5)
    axes.set_yticks(ranks, [f"{rank}" if is_narrow else f"rank {rank}" for rank in ranks], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    if is_narrow:
        axes.set_ylabel("rank", fontsize=7, labelpad=1)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title(timeline), fontsize=7 if is_narrow else 9, loc="left", pad=4, wrap=is_narrow)
    if is_narrow:
        return
    inch = 1 / (axes.get_position().width * axes.figure.get_figwidth())
    for offset, head in ((0.45, "sequences\nheld"), (1.1, "idle")):
        axes.text(1 + offset * inch, 1, head, transform=axes.transAxes, fontsize=6.5, ha="right", va="bottom")
    for rank in ranks:
        peak = sequences_held((span.action for span in timeline.ranks[rank]), timeline.shape)
        idle = 1 - timeline.busy(rank) / timeline.makespan if timeline.makespan else 0.0
        for offset, text in ((0.45, f"{peak:.2f}"), (1.1, f"{idle:.1%}")):
            axes.text(
                1 + offset * inch, rank, text, transform=axes.get_yaxis_transform(), fontsize=7, ha="right", va="center"
            )


def _rectangle(left: float, right: float, low: float, high: float) -> list[tuple[float, float]]:
    return [(left, low), (right, low), (right, high), (left, high)]


def _label(axes: Any, timeline: Timeline, longest: float) -> None:
    """Micro-batch numbers, where the box is wide enough to hold them."""
    spans: list[tuple[int, Span]] = [
        (rank, span) for rank, spans in enumerate(timeline.ranks) for span in spans if span.action.kind in COLOURS
    ]
    if len(spans) > _MAX_LABELS:
        return
    inches = axes.get_position().width * axes.figure.get_figwidth() / longest
    for rank, (action, start, end) in spans:
        text = str(action.microbatch)
        if (end - start) * inches >= 0.055 * len(text) + 0.02:
            middle = (start + end) / 2 - timeline.start
            colour = "white" if action.kind is Kind.I else "black"
            axes.text(middle, rank, text, fontsize=6, color=colour, ha="center", va="center_baseline", clip_on=True)


def _add_legend(figure: Any, timelines: Sequence[Timeline], height: float, columns: int) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    def box(colour: Any) -> Patch:
        return Patch(facecolor=colour, edgecolor="#404040", linewidth=0.3)

    used = {span.action.kind for timeline in timelines for spans in timeline.ranks for span in spans}
    entries: dict[str, Any] = {NAMES[kind]: box(shade(kind, 1, 3)) for kind in NAMES if kind in used}
    for kind, (edge, face, name) in _LINES.items():
        if kind in used:
            entries[name] = Patch(facecolor=face, edgecolor=edge)
    if any(timeline.shape.num_segments > 1 for timeline in timelines):
        entries["first to last segment"] = tuple(map(box, COLOURS[Kind.F]))
    if any(timeline.shape.num_chunks > 1 for timeline in timelines):
        entries["bar: later model chunk"] = box("#404040")
    figure.legend(
        handles=list(entries.values()),
        labels=list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.02 / height),
        ncols=columns,
        columnspacing=1.0,
        handlelength=1.2 if columns < 6 else 2.0,
        labelspacing=0.2,
        fontsize=6.5 if columns < 6 else 7,
        frameon=False,
    )
