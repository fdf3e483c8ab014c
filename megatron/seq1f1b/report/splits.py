"""Partitions of a sequence as a figure: where each strategy cuts, and the costs of its segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schedule import Timeline
from .style import picture, write_right

_LIGHT, _DARK = (0.81, 0.88, 0.96), (0.16, 0.38, 0.64)  # first and last segment


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
    """Write a .png, .svg or .pdf file: for each cut a bar of segments in tokens, left, and in milliseconds, right. Late
    segments are dark; a perfect cut has equally wide ones at the right. Needs matplotlib."""
    with picture(path, 9, 1.0 + max(2.0, 0.36 * len(cuts))) as figure:
        lengths, costs = figure.subplots(1, 2)
        lengths.set_yticks(range(len(cuts)), [f"{cut.name}\nk = {len(cut.lengths)}" for cut in cuts])
        costs.set_yticks([])
        _draw(lengths, [cut.lengths for cut in cuts], "d")
        _draw(costs, [[1e3 * cost for cost in cut.costs] for cut in cuts], ".1f")
        write_right(lengths, [f"{100 * cut.step.bubble_ratio:.1f} %" for cut in cuts])
        write_right(costs, [f"{cut.imbalance:.3f}" for cut in cuts])
        lengths.set_title("Segments in tokens; bubble")
        costs.set_title("Segments in milliseconds on the slowest stage; highest over mean")
        figure.suptitle(title, fontsize=9)


def _draw(axes: Any, rows: Sequence[Sequence[float]], form: str) -> None:
    """A stacked bar of each row."""
    longest = max(map(sum, rows))
    for row, values in enumerate(rows):
        start = 0.0
        for index, value in enumerate(values):
            shade = index / max(1, len(values) - 1)
            colour = [a + shade * (b - a) for a, b in zip(_LIGHT, _DARK, strict=True)]
            axes.barh(row, value, left=start, height=0.72, color=colour, edgecolor="white", linewidth=0.4)
            if value > longest / 16:
                ink = "white" if shade > 0.65 else "black"
                axes.text(start + value / 2, row, f"{value:{form}}", ha="center", va="center", color=ink, fontsize=6)
            start += value
    axes.set(xlim=(0, longest), ylim=(len(rows) - 0.5, -0.5))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
