"""The memory of each pipeline rank over one step, stacked by use.

Tested in rehearsal/test_report.py.
"""

from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

from .style import picture
from .text import GIB

# From below: the state, dark; then what comes and goes, light. The colours differ in grey, too.
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


def plot_memory(report: Mapping[str, Any], path: str | Path) -> None:
    """Write a panel for each pipeline rank to a .png, .svg or .pdf file; needs matplotlib.

    `report` is the JSON of `--dry-run-output`. The actions of the step go to the right in their order, each at its
    highest point; the dashed line is the memory of the device, less what lies outside of the allocator.
    """
    stages = report["pipeline_ranks"]
    num_columns = min(2, len(stages))
    num_rows = -(-len(stages) // num_columns)
    highest = max(sum(stage["fullest"]["peak"].values()) for stage in stages) / GIB
    capacity = report["device_memory"] / GIB
    top = 1.05 * (max(highest, capacity) if capacity < 3 * highest else highest)
    used: set[str] = set()
    for stage in stages:
        for moment in stage["moments"]:
            used.update(moment["peak"])
    names = [name for name in _COLOURS if name in used]
    with picture(path, 4.2 * num_columns, 1.9 * num_rows + 0.7) as figure:
        panels = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False).flat
        for number, (stage, axes) in enumerate(zip(stages, panels, strict=False)):
            moments = list(dropwhile(lambda moment: moment["name"] != "start of the step", stage["moments"]))
            heights = [[moment["peak"].get(name, 0) / GIB for moment in moments] for name in names]
            colours = [_COLOURS[name] for name in names]
            areas = axes.stackplot(range(len(moments)), heights, colors=colours, step="mid", linewidth=0)
            axes.axhline(capacity - stage["outside"] / GIB, color="#b2182b", linestyle="--", linewidth=0.9)
            size = sum(stage["fullest"]["peak"].values()) / GIB
            name = stage["fullest"]["name"]
            axes.set_title(f"rank {number}: {size:.1f} GiB at {name}")
            axes.set(xlim=(0, max(len(moments) - 1, 1)), ylim=(0, top))
        for axes in list(panels)[len(stages) :]:
            axes.set_axis_off()
        figure.supxlabel("actions of the step", fontsize=8)
        figure.supylabel("GiB", fontsize=8)
        figure.legend(areas[::-1], names[::-1], ncols=len(names), loc="outside upper left", title=report["launch"])
