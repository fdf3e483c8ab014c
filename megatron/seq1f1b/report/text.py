"""Tables and numbers of bytes as text.

Tested in rehearsal/test_report.py.
"""

from collections.abc import Sequence

MIB = 2**20
GIB = 2**30


def aligned(rows: Sequence[Sequence[str]], sides: str = "", gap: int = 2) -> list[str]:
    """A line for each row, its cells in columns: flush left or right by the l or r in `sides`, right beyond these."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    put = [str.ljust if side == "l" else str.rjust for side in sides.ljust(len(widths), "r")]
    return [
        (" " * gap).join(side(cell, width) for side, cell, width in zip(put, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def in_words(size: float) -> str:
    """Bytes in the unit that makes them easiest to read."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
