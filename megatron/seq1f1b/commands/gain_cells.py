"""The cells of a map of gains, as lines of a .csv file that grows while they are found.

Tested in commands/test_plan.py by test_a_map_is_continued_where_it_was_left.
"""

import csv
import os
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, structs

from ..files.reading import read_bytes
from ..files.typed import Count, NonNegative, Positive, read_rows, with_way_out
from ..files.writing import unwritable


class CellQuestion(NamedTuple):
    """What is asked of one cell, as it stands in its line."""

    model: str
    machine: str
    seq_length: int
    bandwidth: float
    host_bandwidth: float
    gpus: int
    batch: int


class Cell(Struct, frozen=True):
    """A line of a map: what was asked, and the best steps: their seconds, None where nothing fits, and their bubble
    ratio."""

    model: str
    machine: str
    seq_length: Count
    bandwidth: Positive
    host_bandwidth: NonNegative  # 0: nothing moves to the host
    gpus: Count
    batch: Count
    seconds: Positive | None
    bubble_ratio: NonNegative | None
    configuration: str
    megatron_seconds: Positive | None
    megatron_bubble_ratio: NonNegative | None
    megatron_configuration: str

    @property
    def asked(self) -> CellQuestion:
        return CellQuestion(
            model=self.model,
            machine=self.machine,
            seq_length=self.seq_length,
            bandwidth=self.bandwidth,
            host_bandwidth=self.host_bandwidth,
            gpus=self.gpus,
            batch=self.batch,
        )

    def named_words(self) -> dict[str, str]:
        """The values as they stand in the line."""
        return {name: _word(getattr(self, name)) for name in _NAMES}


def _word(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


_NAMES = [field.name for field in structs.fields(Cell)]


def read_cells(path: Path) -> list[Cell]:
    """The cells of a map, none if there is no such file. A line that a killed run has not finished does not count.
    Raises ValueError for another file."""
    content = read_bytes(path) if path.exists() else b""
    size = _size_of_lines(content)
    try:
        return list(read_rows(path, Cell, content[:size])) if size else []
    except ValueError as error:
        raise with_way_out(error, "mend it, or name another --output") from None


def append_cell(path: Path, cell: Cell) -> None:
    """Write a cell as the last line, below the names in a new file. Raises OSError, with the name of the file."""
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            if not file.tell():
                lines.writerow(_NAMES)
            lines.writerow(cell.named_words().values())
    except OSError as error:
        raise unwritable(error, path) from None


def cut_unfinished_line(path: Path) -> None:
    """Remove the last line of a map, if there is one, that a killed run has not finished."""
    if path.exists():
        os.truncate(path, _size_of_lines(path.read_bytes()))


def _size_of_lines(content: bytes) -> int:
    """The bytes of the lines of a map that are complete."""
    has_names_only = ",".join(_NAMES).encode().startswith(content)  # or a part of its first line
    if has_names_only:
        return 0
    end_of_last_line = content.rfind(b"\n") + 1
    return end_of_last_line or len(content)  # another file, which has no lines, is to be refused as a whole
