"""Partitions of a sequence as a figure: where each strategy cuts, and what its segments then cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from ..schedule import Timeline
from .style import picture

_LIGHT, _DARK = (0.81, 0.88, 0.96), (0.16, 0.38, 0.64)  # first and last segment
_LINES = ("#8c8c8c", "#c2588a", "#3f7fc1", "#e0822d", "#4fa35c", "#7a5fb5")
_MOST_MARKS = 16  # of segments


@dataclass(frozen=True)
class Cut:
    """A way to cut a sequence: lengths in tokens, costs on the slowest stage in seconds, and the simulated step."""

    name: str
    lengths: tuple[int, ...]
    costs: tuple[float, ...]
    step: Timeline

    @property
    def imbalance(self) -> float:
        return max(self.costs) * len(self.costs) / sum(self.costs)


def plot_splits(cuts: Sequence[Cut], title: str, path: str | Path) -> None:
    """Writes a .png, .svg or .pdf file.

    Left is a bar of segments for each cut, late ones dark; right is the cost of each segment over the mean of its cut,
    where a perfect one is a flat line at 1. Needs matplotlib.
    """
    total = sum(cuts[0].lengths)
    with picture(path, 9, 1.0 + max(2.0, 0.36 * len(cuts))) as figure:
        bars, lines = figure.subplots(1, 2, width_ratios=(1.25, 1))
        for axes in (bars, lines):
            axes.set_xlim(0, total)
            axes.set_xticks([total * i / 4 for i in range(5)], [f"{total * i / 4096:g}k" for i in range(5)])
        _draw_bars(bars, cuts, total)
        _draw_costs(lines, cuts)
        figure.suptitle(title, fontsize=9)


def _draw_bars(bars: Any, cuts: Sequence[Cut], total: int) -> None:
    for row, cut in enumerate(cuts):
        start, count = 0, len(cut.lengths)
        for index, length in enumerate(cut.lengths):
            shade = index / max(1, count - 1)
            colour = [a + shade * (b - a) for a, b in zip(_LIGHT, _DARK, strict=True)]
            bars.barh(row, length, left=start, height=0.72, color=colour, edgecolor="white", linewidth=0.4)
            if length > total / 18:
                ink = "white" if shade > 0.65 else "black"
                bars.text(start + length / 2, row, str(length), ha="center", va="center", color=ink, fontsize=6)
            start += length
    bars.set_yticks(range(len(cuts)), [f"{cut.name}\nk = {len(cut.lengths)}" for cut in cuts])
    bars.set_ylim(len(cuts) - 0.5, -0.5)
    bubbles = bars.secondary_yaxis("right")
    bubbles.set_yticks(range(len(cuts)), [f"{100 * cut.step.bubble_ratio:.1f} %" for cut in cuts])
    for axes, side in ((bars, "left"), (bubbles, "right")):
        axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
    bars.set_xlabel("tokens")
    bars.set_title("Segments, first to last, and bubble")


def _draw_costs(lines: Any, cuts: Sequence[Cut]) -> None:
    for cut, colour, mark in zip(cuts, cycle(_LINES), cycle("osD^vP")):
        mean = sum(cut.costs) / len(cut.costs)
        places = [end - length / 2 for end, length in zip(accumulate(cut.lengths), cut.lengths, strict=True)]
        marker = mark if len(cut.lengths) <= _MOST_MARKS else ""
        label = f"{cut.name} ({cut.imbalance:.3f})"
        lines.plot(places, [cost / mean for cost in cut.costs], color=colour, marker=marker, markersize=4, label=label)
    lines.axhline(1, color="black", linewidth=0.6, zorder=0)
    lines.set_xlabel("tokens; a mark is the middle of a segment")
    lines.set_ylabel("cost / mean, slowest stage")
    lines.set_title("Cost of each segment (highest over mean)")
    lines.legend()
