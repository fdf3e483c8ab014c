"""Where segments pay, as a picture: the gain over Megatron's own schedules by network, number of GPUs and batch.

Tested in commands/test_plan.py by test_a_map_is_continued_where_it_was_left.
"""

from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from .style import picture

_WITHIN_ERROR = "#d9d9d9"


class Place(NamedTuple):
    """A cell of the map: GB/s of a node, the number of GPUs, and the sequences of a step."""

    bandwidth: float
    gpus: int
    batch: int


def plot_gain_map(gains: Mapping[Place, float | None], error: float, title: str, path: Path) -> None:
    """Write a panel for each number of sequences to a .png, .svg or .pdf file, with gains in percent: grey where they
    are within the `error`, with a dash where not both sides fit, white where nothing was planned. Gains and error are
    relative. Needs matplotlib."""
    bandwidths = sorted({place.bandwidth for place in gains})
    batches = sorted({place.batch for place in gains})
    devices = {batch: sorted({place.gpus for place in gains if place.batch == batch}) for batch in batches}
    columns = [len(devices[batch]) for batch in batches]
    num_cells = len(bandwidths) * sum(columns)
    with picture(path, 2 + 0.3 * len(batches) + 0.9 * sum(columns), 3.6) as figure:
        panels = figure.subplots(1, len(batches), squeeze=False, sharey=True, width_ratios=columns)[0]
        for axes, batch in zip(panels, batches, strict=True):
            rows = [[Place(bandwidth, gpus, batch) for gpus in devices[batch]] for bandwidth in bandwidths]
            image = _draw(axes, rows, gains, error)
            axes.set_xticks(range(len(devices[batch])), devices[batch])
            axes.set_yticks(range(len(bandwidths)), [f"{bandwidth:g}" for bandwidth in bandwidths])
            axes.set(xlabel="GPUs", title=f"{batch} sequences a step")
        figure.colorbar(image, label="gain in tokens/s, %")
        panels[0].set_ylabel("GB/s of a node")
        figure.suptitle(title)
        _add_legend(figure, error, has_gaps=len(gains) < num_cells, has_dashes=None in gains.values())


def _draw(axes: Any, rows: list[list[Place]], gains: Mapping[Place, float | None], error: float) -> Any:
    """Draw the cells of a panel, with their gains in percent; returns what a bar of colours explains."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    percents = np.full((len(rows), len(rows[0])), nan)
    for row, places in enumerate(rows):
        for column, place in enumerate(places):
            if place not in gains:
                continue
            gain = gains[place]
            if gain is not None:
                percents[row, column] = 100 * gain
            axes.annotate(_text_of(gain), (column, row), ha="center", va="center")
    known = np.ma.masked_invalid(percents)
    within_error = np.ma.masked_outside(known, -100 * error, 100 * error)
    beyond_error = np.ma.masked_inside(known, -100 * error, 100 * error)
    axes.imshow(within_error, cmap=ListedColormap([_WITHIN_ERROR]), origin="lower", aspect="auto")
    return axes.imshow(beyond_error, cmap="RdYlGn", vmin=-40, vmax=40, origin="lower", aspect="auto")


def _text_of(gain: float | None) -> str:
    """A gain in percent, without the sign of a zero."""
    if gain is None:
        return "–"
    percent = round(100 * gain)
    return f"{percent:+d}" if percent else "0"


def _add_legend(figure: Any, error: float, has_gaps: bool, has_dashes: bool) -> None:
    from matplotlib.patches import Patch

    entries = {f"within the error of predictions, {100 * error:.0f} %": Patch(facecolor=_WITHIN_ERROR)}
    if has_gaps:
        entries["not planned"] = Patch(facecolor="white", edgecolor="black", linewidth=0.5)
    if has_dashes:
        entries["– not both sides fit"] = Patch(facecolor="none")
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=len(entries))
