"""Shared by pictures: how each kind of action is drawn, its shade for a segment, and the style of figures.

Tested in report/test_figure.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..files.writing import written_whole
from ..schedule import Kind


class Box(NamedTuple):
    """A compute action: its name in legends, the light and dark end of its shades, and the colour of its number."""

    name: str
    light: str
    dark: str
    number: str = "black"


class Line(NamedTuple):
    """An action beside compute: its name in legends, and the colours of its edge and its face."""

    name: str
    edge: str
    face: str


# Hues that the colour-blind can distinguish (after Okabe and Ito), and lightnesses that do not overlap in grey: a
# forward is the lightest but darker than idle, an input gradient darkest.
BOXES: Mapping[Kind, Box] = MappingProxyType(
    {
        Kind.F: Box("forward", "#b4d9f4", "#8bc3f1"),
        Kind.B: Box("backward", "#f0a04b", "#d17f26"),
        Kind.I: Box("input gradient", "#8f4a8c", "#5f2465", number="white"),
        Kind.W: Box("weight gradient", "#47946a", "#2d7d54"),
    }
)
LINES: Mapping[Kind, Line] = MappingProxyType(
    {
        Kind.GATHER: Line("parameter gathering", edge="#5e3c99", face="white"),
        Kind.REDUCE: Line("gradient reduction", edge="#b2182b", face="#b2182b"),
        Kind.OFFLOAD: Line("activations to the host", edge="#35978f", face="#35978f"),
        Kind.RELOAD: Line("activations back", edge="#01665e", face="white"),
    }
)


def shade(kind: Kind, segment: int, num_segments: int) -> str:
    """The colour of a box, such as `#8bc3f1`; dark is late."""
    share = segment / (num_segments - 1) if num_segments > 1 else 0.5
    light = bytes.fromhex(BOXES[kind].light[1:])
    dark = bytes.fromhex(BOXES[kind].dark[1:])
    return "#" + bytes(round(a + (b - a) * share) for a, b in zip(light, dark, strict=True)).hex()


@contextmanager
def picture(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches, to be drawn inside, then written to a .png, .svg or .pdf file. Needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {"font.size": 7, "axes.titlesize": 8, "axes.titlelocation": "left", "legend.frameon": False}
    with rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with written_whole(path) as unfinished:
            figure.savefig(unfinished, dpi=200)


def write_right(axes: Any, texts: Sequence[str]) -> None:
    """Write at the right of the rows 0, 1 and so on of a panel."""
    table = axes.secondary_yaxis("right")
    table.set_yticks(range(len(texts)), texts)
    table.tick_params(length=0)
    table.spines["right"].set_visible(False)
