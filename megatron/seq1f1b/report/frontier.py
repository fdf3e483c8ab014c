"""Throughput against memory, with the frontier: what nothing else beats in both."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from ..schedule import written_whole


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
    for (name, points), marker in zip(groups.items(), cycle("os^vD")):
        axes.plot(
            [each.memory for each in points], [each.throughput for each in points], marker, markersize=4, alpha=0.6,
            label=name,
        )  # fmt: skip
    best = frontier([point for points in groups.values() for point in points])
    axes.step([each.memory for each in best], [each.throughput for each in best], where="post", color="black", lw=1)
    axes.set_xlim(left=0)
    # Above and to the left of a point of the frontier there is neither a line nor a point, but near the axis no room.
    for point in _apart(best, 0.04 * (axes.get_ylim()[1] - axes.get_ylim()[0])):
        is_at_left = point.memory < 0.25 * axes.get_xlim()[1]
        axes.annotate(
            point.name,
            (point.memory, point.throughput),
            xytext=(4, -9) if is_at_left else (-3, 3),
            textcoords="offset points",
            fontsize=7,
            ha="left" if is_at_left else "right",
        )
    axes.axvline(limit, color="#b03030", lw=1, ls="--")
    axes.annotate(
        "a device holds ", (limit, 0.02), xycoords=axes.get_xaxis_transform(), rotation=90, fontsize=7, ha="right",
        va="bottom", color="#b03030",
    )  # fmt: skip
    axes.set_xlabel("memory of the fullest device, GiB")
    axes.set_ylabel("tokens/s of all devices")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=160)


def _apart(points: Sequence[Point], gap: float) -> list[Point]:
    """The fastest point, and slower ones that are at least `gap` apart, so that their names do not overlap."""
    found: list[Point] = []
    for point in reversed(points):
        if not found or point.throughput <= found[-1].throughput - gap:
            found.append(point)
    return found
