"""Shared by pictures: the colour of a kind of action, its shade for a segment, its name; and the style of figures."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..schedule import Kind, written_whole

# Light and dark end of the shades of each kind. Hues that the colour-blind can distinguish (after Okabe and Ito), and
# lightnesses that do not overlap in grey: a forward is the lightest but darker than idle, an input gradient darkest.
COLOURS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        Kind.F: ("#b4d9f4", "#8bc3f1"),
        Kind.B: ("#f0a04b", "#d17f26"),
        Kind.W: ("#47946a", "#2d7d54"),
        Kind.I: ("#8f4a8c", "#5f2465"),
    }
)
NAMES: Mapping[Kind, str] = MappingProxyType(
    {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
)


def shade(kind: Kind, segment: int, num_segments: int) -> str:
    """The colour of a box, such as `#8bc3f1`; dark is late."""
    share = segment / (num_segments - 1) if num_segments > 1 else 0.5
    light, dark = (bytes.fromhex(colour[1:]) for colour in COLOURS[kind])
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
