"""Gains over networks and numbers of GPUs, as contours."""

from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import NamedTuple

from ..schedule import written_whole


class GainAt(NamedTuple):
    """GB/s of a node, GPUs, sequences of a step, and the relative gain; None where there is none to tell."""

    bandwidth: float
    devices: int
    batch: int
    gain: float | None


_LEVELS = (-40, -20, -10, 0, 10, 20, 40)


def plot_gains(points: Sequence[GainAt], error: float, title: str, path: Path) -> None:
    """One panel for each number of sequences; grey where the gain in percent is within the error."""
    import numpy as np
    from matplotlib.figure import Figure

    bandwidths = sorted({each.bandwidth for each in points})
    devices, batches = sorted({each.devices for each in points}), sorted({each.batch for each in points})
    figure = Figure(figsize=(1 + 3.2 * len(batches), 3.4), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    found = {point[:3]: nan if point.gain is None else 100 * point.gain for point in points}
    for axes, batch in zip(panels, batches, strict=True):
        gains = np.array([[found.get((speed, count, batch), nan) for count in devices] for speed in bandwidths])
        for row, speed in enumerate(bandwidths):
            for column, count in enumerate(devices):
                text = "-" if np.isnan(gains[row, column]) else f"{gains[row, column]:+.0f}"
                axes.annotate(text, (count, speed), fontsize=7, ha="center", va="center")
        if min(gains.shape) > 1 and np.isfinite(gains).sum() > 3:
            filled = axes.contourf(devices, bandwidths, gains, _LEVELS, cmap="RdYlGn", extend="both", alpha=0.7)
            axes.contourf(devices, bandwidths, gains, (-error, error), colors="#cccccc")
            if axes is panels[-1]:
                figure.colorbar(filled, label="gain, %; grey: within error")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlim(devices[0] / 1.3, 1.3 * devices[-1])
        axes.set_ylim(bandwidths[0] / 1.2, 1.2 * bandwidths[-1])
        axes.set_xticks(devices, map(str, devices))
        axes.set_yticks(bandwidths, [f"{each:g}" for each in bandwidths])
        axes.set_xlabel("GPUs")
        axes.set_title(f"{batch} sequences a step", fontsize=9)
    panels[0].set_ylabel("GB/s of a node")
    figure.suptitle(title, fontsize=9)
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=160)
