"""One published figure with the set-up that it was measured with."""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Self

from megatron.seq1f1b.costs.machine import GIB, Machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.simulator import Prediction
from megatron.seq1f1b.costs.training_setup import TrainingSetup

REFERENCE = Path(__file__).with_name("reference")


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 32768) -> ModelShape:
    """The sizes of the papers: a feed-forward block of four times the hidden size, heads that share it."""
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocabulary,
    )


def fits(prediction: Prediction) -> bool:
    """Whether it fits a device of its machine as a whole."""
    return max(memory.total for memory in prediction.memory) <= prediction.machine.device.memory_gib * GIB


@dataclass(frozen=True)
class Row:
    """`published` and `predicted` in `unit`. None stands for a prediction that is out of memory, and for a run that was
    or failed otherwise. Where `less_is_better`, a prediction below what is published misses nothing."""

    table: str
    label: str
    unit: str
    published: float | None
    predicted: float | None = None
    measured: float | None = None
    group: str = ""
    setup: TrainingSetup | None = None
    machine: Machine | None = None
    less_is_better: bool = False

    @property
    def error(self) -> float | None:
        """The relative error, for a bubble the absolute one; None where either is out of memory."""
        if self.published is None or self.predicted is None:
            return None
        if self.unit == "bubble":
            return self.predicted - self.published
        return self.predicted / self.published - 1

    @property
    def miss(self) -> float | None:
        """How far the prediction is from the published value, or above it where less is better."""
        return self.error if self.error is None else max(self.error, 0.0 if self.less_is_better else -self.error)


@dataclass(frozen=True)
class Errors:
    """The misses of the rows of one table, and their mean error, the bias."""

    count: int
    mean: float
    bias: float
    worst: float

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Errors":
        pairs = [(row.miss, row.error) for row in rows if row.error is not None and row.miss is not None]
        misses, errors = zip(*pairs, strict=True)
        return cls(
            count=len(errors),
            mean=mean(misses),
            bias=mean(errors),
            worst=max(misses),
        )


def slug(label: str) -> str:
    """The name of the log of a row, without `.log`: its words joined by `-`."""
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in label.lower()).split())


class Cell(str):
    """What a table has in a cell; as a number it raises ValueError with its place."""

    place: str

    @classmethod
    def at(cls, text: str, place: str) -> Self:
        cell = cls(text)
        cell.place = place
        return cell

    def __int__(self) -> int:
        return self._as(int, "a whole number")

    def __float__(self) -> float:
        return self._as(float, "a number")

    def _as[Number](self, kind: Callable[[str], Number], words: str) -> Number:
        try:
            return kind(str(self))
        except ValueError:
            raise ValueError(f"{self.place}: {str(self)!r} is not {words}") from None


class Line(dict[str, str]):
    """The cells of a row of a table by their columns. Raises ValueError for a column that the table lacks."""

    def __init__(self, cells: Mapping[str, str], place: str) -> None:
        super().__init__({column: Cell.at(text or "", f"{place}, column {column}") for column, text in cells.items()})
        self.place = place

    def __missing__(self, column: str) -> str:
        raise ValueError(f"{self.place}: there is no column {column}")


def read(name: str, folder: Path = REFERENCE) -> list[Line]:
    """The rows of a published table; none if the folder does not have it."""
    path = folder / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        return [Line(cells, f"{path.name}, line {lines.line_num}") for cells in lines]


def measured(cell: str) -> float | None:
    """A measurement; None for a run that ended out of memory, or has left none."""
    return None if cell.strip() in ("", "OOM") else float(cell)


def scaled(value: float | None, factor: float) -> float | None:
    """A measurement in another unit."""
    return None if value is None else factor * value


def known[Known](sizes: Mapping[str, Known], model: str) -> Known:
    """The sizes of a model by its name in a table. Raises ValueError for one whose sizes are not known."""
    if model not in sizes:
        place = f"{model.place}: " if isinstance(model, Cell) else ""
        raise ValueError(f"{place}the sizes of {model} are not known; there are {', '.join(sizes)}")
    return sizes[model]
