"""Throughput against memory, with the frontier of configurations that no other beats in both."""

from collections.abc import Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import NamedTuple

from .style import picture


class Point(NamedTuple):
    """A configuration: GiB of its fullest device, tokens/s of all devices, and its name."""

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
    with picture(path, 8, 5) as figure:
        axes = figure.subplots()
        for (name, points), marker in zip(groups.items(), cycle("os^vD")):
            places = [each.memory for each in points], [each.throughput for each in points]
            axes.plot(*places, marker, markersize=4, alpha=0.6, label=name)
        best = frontier([*chain(*groups.values())])
        axes.step(*zip(*(point[:2] for point in best), strict=True), where="post", color="black", lw=1)
        axes.axvline(limit, color="#b03030", lw=1, ls="--", label="a device holds")
        axes.set_xlim(left=0)
        # Slower points have no name where it would overlap that of a faster one.
        gap, lowest = 0.04 * (axes.get_ylim()[1] - axes.get_ylim()[0]), float("inf")
        for point in reversed(best):
            if point.throughput <= lowest - gap:
                lowest = point.throughput
                # Below and to the right, where the frontier leaves room near the axis.
                axes.annotate(point.name, point[:2], xytext=(4, -9), textcoords="offset points")
        axes.set(xlabel="memory of the fullest device, GiB", ylabel="tokens/s of all devices", title=title)
        axes.legend()
