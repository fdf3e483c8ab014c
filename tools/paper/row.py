"""One published figure with the set-up that it was measured with."""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from statistics import mean
from typing import Self

from megatron.seq1f1b.costs.machine import GIB, Machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.simulator import Prediction
from megatron.seq1f1b.costs.training_setup import TrainingSetup

REFERENCE = Path(__file__).with_name("reference")


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 32768) -> ModelShape:
    """The sizes of the papers: a feed-forward block of four times the hidden size, heads that share it. Raises
    ValueError for heads that do not divide it."""
    if hidden % heads:
        raise ValueError(f"{heads} heads do not divide the hidden size {hidden}")
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
    or failed otherwise. `step` is the predicted step, where the figure is one of a whole step. Where `less_is_better`,
    a prediction below what is published misses nothing."""

    table: str
    label: str
    unit: str
    published: float | None
    predicted: float | None = None
    measured: float | None = None
    step: Prediction | None = None
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
    """What a table has in a cell. As a number it raises ValueError with its place, unless it is one, and above 0 as
    every size is; `float` also takes 0, for a share that is none."""

    place: str

    @classmethod
    def at(cls, text: str, place: str) -> Self:
        cell = cls(text)
        cell.place = place
        return cell

    def __int__(self) -> int:
        number = self._as(int, "a whole number")
        if number < 1:
            raise ValueError(f"{self.place}: {number} is not above 0")
        return number

    def __float__(self) -> float:
        number = self._as(float, "a number")
        if not 0 <= number < inf:
            raise ValueError(f"{self.place}: {str(self)!r} is not a number from 0 on")
        return number

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
        raise ValueError(f"{self.place}: there is no column {column}, but {', '.join(self)}")

    def quotient(self, whole: str, *parts: str) -> int:
        """The number in the column `whole` divided by those in the columns `parts`. Raises ValueError if they do not
        divide it."""
        divisor = prod(int(self[part]) for part in parts)
        quotient, remainder = divmod(int(self[whole]), divisor)
        if remainder:
            product = " x ".join(f"{part} {self[part]}" for part in parts)
            raise ValueError(f"{self.place}: {whole} {self[whole]} is no multiple of {product}")
        return quotient

    def index(self, column: str) -> int:
        """A number that is counted from 0, such as that of a stage."""
        cell = self[column]
        if not cell.isdecimal():
            raise ValueError(f"{self.place}, column {column}: {str(cell)!r} is not a number counted from 0")
        return int(str(cell))

    def is_set(self, column: str) -> bool:
        """Whether the cell of a column is yes. Raises ValueError unless it is yes or no."""
        answers = {"yes": True, "1": True, "no": False, "0": False}
        return known(answers, self[column])


def read(name: str, folder: Path = REFERENCE) -> list[Line]:
    """The rows of a published table; none if the folder does not have it."""
    path = folder / f"{name}.csv"
    if not path.is_file():
        return []
    found = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.DictReader(file)
        try:
            for cells in lines:
                place = f"{path.name}, line {lines.line_num}"
                if None in cells:
                    raise ValueError(f"{place}: it has more cells than there are columns; quote a cell with a comma")
                found.append(Line(cells, place))
        except UnicodeDecodeError:
            raise ValueError(f"{path.name} is not in UTF-8; save it as such") from None
    return found


def measured(cell: str) -> float | None:
    """A measurement; None for a run that ended out of memory, or has left none. Raises ValueError for 0."""
    if cell.strip() in ("", "OOM"):
        return None
    value = float(cell)
    if value == 0:
        place = f"{cell.place}: " if isinstance(cell, Cell) else ""
        raise ValueError(f"{place}a measurement of 0; leave the cell of a run that failed empty")
    return value


def scaled(value: float | None, factor: float) -> float | None:
    """A measurement in another unit."""
    return None if value is None else factor * value


def known[Known](choices: Mapping[str, Known], name: str) -> Known:
    """What a name in a table stands for, such as the sizes of a model. Raises ValueError for one that is not known."""
    if name not in choices:
        place = f"{name.place}: " if isinstance(name, Cell) else ""
        raise ValueError(f"{place}{str(name)!r} is not known; there are {', '.join(choices)}")
    return choices[name]


def check_devices(row: Line, column: str, setup: TrainingSetup) -> None:
    """Raise ValueError unless the number of devices in a column is that of the parallel sizes of the row."""
    if int(row[column]) == setup.num_devices:
        return
    sizes = {
        "TP": setup.tensor_parallel,
        "CP": setup.context_parallel,
        "PP": setup.pipeline_parallel,
        "DP": setup.data_parallel,
    }
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    raise ValueError(f"{row.place}: {column} {row[column]}, but {product or 'one rank'} takes {setup.num_devices}")
