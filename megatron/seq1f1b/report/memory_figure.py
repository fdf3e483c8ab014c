"""The memory of each pipeline rank over one step, stacked by what it holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..schedule import written_whole

# What stays is dark and below, what comes and goes light and above; they differ in grey, too.
_COLOURS = {
    "weights": "#4d4d4d",
    "gradients": "#7f7f7f",
    "optimizer state": "#b3b3b3",
    "keys and values": "#3f7fc1",
    "activations": "#9ecae1",
    "messages": "#fbdcb8",
    "logits": "#c2588a",
    "temporaries": "#e0822d",
}
_GIB = 2**30
_PANEL = 4.2, 1.9  # inches


def plot_memory(report: Mapping[str, Any], path: str | Path) -> None:
    """Write a panel for each pipeline rank to a .png, .svg or .pdf file; needs matplotlib.

    `report` is what `--dry-run-output` writes as JSON. To the right go the actions of the step in their order, each at
    its highest point; the dashed line is the memory of the device, less what lies outside of the allocator.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    stages = report["pipeline_ranks"]
    num_columns = min(2, len(stages))
    num_rows = -(-len(stages) // num_columns)
    width, height = _PANEL[0] * num_columns, _PANEL[1] * num_rows + 0.9
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False)
    highest = max(sum(stage["fullest"]["peak"].values()) for stage in stages) / _GIB
    capacity = report["device_memory"] / _GIB
    shows_capacity = capacity < 3 * highest
    names = [name for name in _COLOURS if any(name in moment["peak"] for s in stages for moment in s["moments"])]
    areas = []
    for number, (stage, axes) in enumerate(zip(stages, panels.flat, strict=False)):
        moments = _of_the_step(stage["moments"])
        heights = [[moment["peak"].get(name, 0) / _GIB for moment in moments] for name in names]
        areas = axes.stackplot(
            range(len(moments)), heights, colors=[_COLOURS[name] for name in names], step="mid", linewidth=0
        )
        if shows_capacity:
            axes.axhline(capacity - stage["outside"] / _GIB, color="#b2182b", linestyle="--", linewidth=0.9)
        size, name = sum(stage["fullest"]["peak"].values()) / _GIB, stage["fullest"]["name"]
        axes.set_title(f"rank {number}: {size:.1f} GiB at {name}", fontsize=8, loc="left", pad=3)
        axes.set_xlim(0, max(len(moments) - 1, 1))
        axes.set_ylim(0, (max(highest, capacity) if shows_capacity else highest) * 1.05)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(panels.flat)[len(stages) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("GiB", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("actions of the step", fontsize=8)
    figure.suptitle(report["launch"], fontsize=8, x=0.01, ha="left", y=1 - 0.12 / height)
    figure.legend(
        areas[::-1], names[::-1], ncols=len(names), fontsize=7, frameon=False, loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.2 / height), handlelength=1, columnspacing=1,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.45 / height))
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=200)


def _of_the_step(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moments of the step, without the building of the model and the optimizer's first step."""
    begins = next((index for index, moment in enumerate(moments) if moment["name"] == "start of the step"), 0)
    return moments[begins:]
