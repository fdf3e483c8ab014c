"""Time to train and its cost against the number of devices."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from megatron.seq1f1b.report.style import picture


def plot_training_time(lines: Mapping[str, Sequence[tuple[int, float, float]]], title: str, path: Path) -> None:
    """For each line its points: devices, days, device hours."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    lines = {name: points for name, points in lines.items() if points}
    ticks = sorted({point[0] for points in lines.values() for point in points})
    with picture(path, 9, 5) as figure:
        days, hours = figure.subplots(1, 2)
        for (name, points), style in zip(lines.items(), cycle(("o-", "s--", "^:", "v-.", "D-"))):
            devices = [point[0] for point in points]
            days.loglog(devices, [point[1] for point in points], style, markersize=4, label=name)
            hours.loglog(devices, [point[2] / 1000 for point in points], style, markersize=4, label=name)
        days.set_ylabel("days")
        hours.set_ylabel("thousands of device hours")
        for axes in (days, hours):
            axes.set_xticks(ticks, list(map(str, ticks)), rotation=45)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.minorticks_off()
            axes.set_xlabel("devices")
        if len(lines) > 1:
            figure.legend(*days.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.suptitle(title, fontsize=9)
