"""Tables and numbers of bytes as text.

Tested in rehearsal/test_report.py.
"""

from collections.abc import Sequence

MIB = 2**20
GIB = 2**30


def aligned(rows: Sequence[Sequence[str]], sides: str = "", gap: int = 2) -> list[str]:
    """A line for each row, its cells in columns: flush left or right by the l or r in `sides`, right beyond these."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides.ljust(len(widths), "r")
    lines = []
    for row in rows:
        cells = []
        for cell, width, side in zip(row, widths, sides, strict=True):
            cells.append(cell.ljust(width) if side == "l" else cell.rjust(width))
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def in_words(size: float) -> str:
    """Bytes in the unit that makes them easiest to read."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
