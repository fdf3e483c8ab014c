"""What all pictures of schedules share: the colour of a kind, its shade for a segment, its name."""

from collections.abc import Mapping
from types import MappingProxyType

from ..schedule import Kind

# Light and dark end of the shades of each kind. Hues that the colour-blind can distinguish (after Okabe and Ito), and
# lightnesses that do not overlap, for print in grey: forward is the lightest, though
# darker than white, which is idle, an input gradient the darkest.
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
