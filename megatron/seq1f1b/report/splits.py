"""Partitions of a sequence as a figure: where each strategy cuts, and what its segments then cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..schedule import Timeline, written_whole

_LIGHT, _DARK = (0.81, 0.88, 0.96), (0.16, 0.38, 0.64)  # first and last segment
_LINES = ("#8c8c8c", "#c2588a", "#3f7fc1", "#e0822d", "#4fa35c", "#7a5fb5")
_MARKS = "osD^vP"
_MOST_LABELS = 16  # of segments with their length or a mark


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
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(11.5, 1.1 + max(2.6, 0.42 * len(cuts))), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=(1.25, 1))
    total = sum(cuts[0].lengths)
    _draw_bars(bars, cuts, total)
    _draw_costs(lines, cuts)
    for axes in (bars, lines):
        axes.set_xlim(0, total)
        axes.set_xticks([total * i / 4 for i in range(5)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x else "0"))
        axes.spines[["top", "right"]].set_visible(False)
    bars.spines["left"].set_visible(False)
    bars.tick_params(left=False)
    figure.suptitle(title, fontsize=10.5)
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=160)


def _draw_bars(bars: Any, cuts: Sequence[Cut], total: int) -> None:
    for row, cut in enumerate(cuts):
        start, count = 0, len(cut.lengths)
        for index, length in enumerate(cut.lengths):
            shade = index / max(1, count - 1)
            colour = [a + shade * (b - a) for a, b in zip(_LIGHT, _DARK, strict=True)]
            gap = min(0.6, _MOST_LABELS / count)
            bars.barh(row, length, left=start, height=0.72, color=colour, edgecolor="white", linewidth=gap)
            if length > total / 18:
                ink = "white" if shade > 0.65 else "black"
                bars.text(start + length / 2, row, str(length), ha="center", va="center", color=ink, fontsize=7.5)
            start += length
        bars.text(total * 1.02, row, f"{100 * cut.step.bubble_ratio:.1f} %", va="center", fontsize=8.5)
    bars.text(total * 1.02, -0.75, "bubble", fontsize=8.5, va="center")
    bars.set_yticks(range(len(cuts)), [f"{cut.name}\nk = {len(cut.lengths)}" for cut in cuts], fontsize=8.5)
    bars.set_ylim(len(cuts) - 0.5, -0.95)
    bars.set_xlabel("tokens")
    bars.set_title("Segments, first to last", fontsize=10)


def _draw_costs(lines: Any, cuts: Sequence[Cut]) -> None:
    for index, cut in enumerate(cuts):
        mean = sum(cut.costs) / len(cut.costs)
        places = [end - length / 2 for end, length in zip(accumulate(cut.lengths), cut.lengths, strict=True)]
        mark = _MARKS[index % len(_MARKS)] if len(cut.lengths) <= _MOST_LABELS else ""
        lines.plot(
            places,
            [cost / mean for cost in cut.costs],
            color=_LINES[index % len(_LINES)],
            marker=mark,
            markersize=4,
            linewidth=1.4,
            label=f"{cut.name} ({cut.imbalance:.3f})",
        )
    lines.axhline(1, color="black", linewidth=0.6, zorder=0)
    lines.set_xlabel("tokens; a mark is the middle of a segment")
    lines.set_ylabel("cost / mean, slowest stage")
    lines.set_title("Cost of each segment (highest over mean)", fontsize=10)
    lines.legend(fontsize=8, frameon=False)
