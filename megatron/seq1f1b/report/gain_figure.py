"""Where segments pay, as a picture: the gain over Megatron's own schedules by network, number of GPUs and batch.

Tested in commands/test_plan.py by test_a_map_is_continued_where_it_was_left.
"""

from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from .style import picture


class Place(NamedTuple):
    """A cell of the map: GB/s of a node, the number of GPUs, and the sequences of a step."""

    bandwidth: float
    gpus: int
    batch: int


def plot_gain_map(gains: Mapping[Place, float | None], error: float, title: str, path: Path) -> None:
    """Write a panel for each number of sequences to a .png, .svg or .pdf file, with gains in percent: grey where they
    are within the `error`, white where there is none. Gains and error are relative. Needs matplotlib."""
    import numpy as np

    bandwidths = sorted({place.bandwidth for place in gains})
    batches = sorted({place.batch for place in gains})
    devices = {batch: sorted({place.gpus for place in gains if place.batch == batch}) for batch in batches}
    columns = [len(devices[batch]) for batch in batches]
    with picture(path, 2 + 0.3 * len(batches) + 0.9 * sum(columns), 3.4) as figure:
        panels = figure.subplots(1, len(batches), squeeze=False, sharey=True, width_ratios=columns)[0]
        for axes, batch in zip(panels, batches, strict=True):
            percents = np.full((len(bandwidths), len(devices[batch])), nan)
            for row, bandwidth in enumerate(bandwidths):
                for column, gpus in enumerate(devices[batch]):
                    gain = gains.get(Place(bandwidth, gpus, batch))
                    if gain is not None:
                        percents[row, column] = 100 * gain
            image = _draw(axes, percents, 100 * error)
            axes.set_xticks(range(len(devices[batch])), devices[batch])
            axes.set_yticks(range(len(bandwidths)), [f"{bandwidth:g}" for bandwidth in bandwidths])
            axes.set(xlabel="GPUs", title=f"{batch} sequences")
        figure.colorbar(image, label="gain, %; grey: within error")
        panels[0].set_ylabel("GB/s of a node")
        figure.suptitle(title)


def _draw(axes: Any, percents: Any, error: float) -> Any:
    """Draw an array of gains in percent, with their numbers; returns what a bar of colours explains."""
    import numpy as np

    known = np.ma.masked_invalid(percents)
    axes.imshow(known, cmap="Greys", vmin=-100, vmax=300, origin="lower", aspect="auto")
    beyond_error = np.ma.masked_inside(known, -error, error)
    image = axes.imshow(beyond_error, cmap="RdYlGn", vmin=-40, vmax=40, origin="lower", aspect="auto")
    for (row, column), percent in np.ndenumerate(percents):
        if not np.isnan(percent):
            axes.annotate(f"{percent:+.0f}", (column, row), ha="center", va="center")
    return image
