"""Pictures of the planner's answers: throughput against memory, and where each strategy cuts a sequence.

Tested in commands/test_plan.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple

from ..schedule import Timeline
from .style import picture, write_right

_LIGHT = (0.81, 0.88, 0.96)  # first segment
_DARK = (0.16, 0.38, 0.64)  # last segment


class _Mark(NamedTuple):
    """The sign of a configuration that is marked, and its size."""

    sign: str
    size: int


# In this order, above each other. The first is smaller, so that it shows on another one of the same configuration.
_MARKS = (_Mark("*", 8), _Mark("s", 12), _Mark("P", 12))


class Point(NamedTuple):
    """A configuration: GiB of its fullest device, tokens/s of all devices, and its name."""

    memory: float
    throughput: float
    name: str


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both, from the least memory to the highest throughput."""
    best: list[Point] = []
    for point in sorted(points, key=lambda known: (known.memory, -known.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best


def plot_frontier(
    groups: Mapping[str, Sequence[Point]], marked: Mapping[str, Point], limit: float, title: str, path: Path
) -> None:
    """Draw the configurations of each group in a colour, and a line at the memory of a device. The frontier of all
    groups has the names of its configurations. Up to three configurations are `marked`, by what they are."""
    with picture(path, 8, 5) as figure:
        axes = figure.subplots()
        for (name, points), marker in zip(groups.items(), cycle("os^vD")):
            memory = [point.memory for point in points]
            throughput = [point.throughput for point in points]
            axes.plot(memory, throughput, marker, markersize=4, alpha=0.6, label=name)
        for number, (what, point) in enumerate(marked.items()):
            mark = _MARKS[number]
            axes.plot(
                point.memory,
                point.throughput,
                mark.sign,
                markersize=mark.size,
                markeredgecolor="white",
                zorder=9 - number,
                label=f"{what}: {point.name}",
            )
        best = frontier(list(chain.from_iterable(groups.values())))
        memory = [point.memory for point in best]
        throughput = [point.throughput for point in best]
        axes.step(memory, throughput, where="post", color="black", lw=1)
        axes.axvline(limit, color="#b03030", lw=1, ls="--", label="memory of a device")
        axes.set_xlim(left=0)
        # Slower points have no name where it would overlap that of a faster one.
        gap = 0.04 * (axes.get_ylim()[1] - axes.get_ylim()[0])
        lowest = float("inf")
        for point in reversed(best):
            if point.throughput <= lowest - gap:
                lowest = point.throughput
                # Below and to the right, where the frontier leaves room near the axis.
                place = (point.memory, point.throughput)
                axes.annotate(point.name, place, xytext=(4, -9), textcoords="offset points")
        axes.set(xlabel="memory of the fullest device, GiB", ylabel="tokens/s of all devices", title=title)
        axes.legend()


@dataclass(frozen=True)
class CutRow:
    """A way to cut a sequence: lengths in tokens, costs on the slowest stage in seconds, and the simulated step."""

    name: str
    lengths: tuple[int, ...]
    costs: tuple[float, ...]
    step: Timeline

    @property
    def imbalance(self) -> float:
        return max(self.costs) * len(self.costs) / sum(self.costs)


def plot_splits(cuts: Sequence[CutRow], title: str, path: str | Path) -> None:
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
