"""Throughput against memory, with the frontier: what nothing else beats in both."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Point(NamedTuple):
    """A configuration: GiB of its fullest device, tokens/s of all devices, and what it is called."""

    memory: float
    throughput: float
    name: str


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both, from the least memory to the highest throughput."""
    found: list[Point] = []
    for point in sorted(points, key=lambda each: (each.memory, -each.throughput)):
        if not found or point.throughput > found[-1].throughput:
            found.append(point)
    return found


def plot_frontier(groups: dict[str, Sequence[Point]], limit: float, title: str, path: Path) -> None:
    """One colour per group, names along the common frontier, and a line at the memory of a device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in groups.items():
        axes.plot(
            [each.memory for each in points], [each.throughput for each in points], "o", markersize=4, alpha=0.6,
            label=name,
        )  # fmt: skip
    best = frontier([point for points in groups.values() for point in points])
    axes.step([each.memory for each in best], [each.throughput for each in best], where="post", color="black", lw=1)
    for point in _apart(best):
        axes.annotate(
            point.name, (point.memory, point.throughput), xytext=(4, 4), textcoords="offset points", fontsize=7
        )
    axes.axvline(limit, color="#b03030", lw=1, ls="--")
    axes.annotate("a device holds", (limit, axes.get_ylim()[0]), rotation=90, fontsize=7, ha="right", color="#b03030")
    axes.set_xlabel("memory of the fullest device, GiB")
    axes.set_ylabel("tokens/s of all devices")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def _apart(points: Sequence[Point]) -> list[Point]:
    """Points whose names do not overlap: at least two percent faster than the one before."""
    found: list[Point] = []
    for point in points:
        if not found or point.throughput > 1.02 * found[-1].throughput:
            found.append(point)
    return found
