"""What is in memory at every moment of a step, from the births and deaths of storages."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ..report.colours import NAMES
from ..schedule import parse_action


class Category(StrEnum):
    """What a storage holds."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    STATE = "keys and values"
    LOGITS = "logits"
    MESSAGES = "messages"
    TEMPORARY = "temporaries"


@dataclass(frozen=True)
class Moment:
    """One action of a step: bytes by category at its highest point, and bytes in all when it ends."""

    name: str
    peak: dict[Category, int]
    end: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


def at(moment: str) -> str:
    """When something happens, in words: `2F3.1` is in the forward of stage 2 for segment 1 of micro-batch 3."""
    if moment in _OTHER_MOMENTS:
        return _OTHER_MOMENTS[moment]
    kind, stage, microbatch, segment = parse_action(moment.removeprefix("after "))
    when = "after" if moment.startswith("after ") else "in"
    return f"{when} the {NAMES[kind]} of stage {stage} for segment {segment} of micro-batch {microbatch}"


_OTHER_MOMENTS = {
    "build": "while the model is built",
    "first optimizer step": "in the first step of the optimizer",
    "step begins": "before the first forward",
    "optimizer step": "in the step of the optimizer",
}


class Ledger:
    """Entries are made in the order of time. A category given later holds from the birth of the storage on.

    `default` is the category of what is born from now on, until it is set again.
    """

    def __init__(self) -> None:
        self.default = Category.ACTIVATIONS
        self._sizes: list[int] = []
        self._categories: list[Category] = []
        # A birth is n + 1, a death -(n + 1) for storage n, the start of a moment is a string, bytes that come and go
        # within one operator are a tuple.
        self._log: list[int | str | tuple[int]] = []

    def begin(self, moment: str) -> None:
        """What follows belongs to `moment`."""
        self._log.append(moment)

    def birth(self, size: int) -> int:
        """The number of a new storage of `size` bytes."""
        number = len(self._sizes)
        self._sizes.append(size)
        self._categories.append(self.default)
        self._log.append(number + 1)
        return number

    def death(self, number: int) -> None:
        self._log.append(-number - 1)

    def pass_through(self, size: int) -> None:
        """`size` bytes were there for the length of one operator."""
        self._log.append((size,))

    def label(self, number: int, category: Category) -> None:
        self._categories[number] = category

    def moments(self) -> Iterator[Moment]:
        """All moments in order. Activations that are born and die within one are temporaries."""
        categories = self._with_temporaries()
        now: Counter[Category] = Counter()
        peak: dict[Category, int] = {}
        total = highest = 0
        name, is_rising = "", False
        for entry in self._log:
            if isinstance(entry, int) and entry > 0:
                now[categories[entry - 1]] += self._sizes[entry - 1]
                total += self._sizes[entry - 1]
                if total > highest:
                    highest, is_rising = total, True
                continue
            if is_rising:  # categories are final here, so they are read only now
                peak, is_rising = dict(now), False
            if isinstance(entry, str):
                if name:
                    yield Moment(name, peak, total)
                name, highest, peak = entry, total, dict(now)
            elif isinstance(entry, tuple):
                if total + entry[0] > highest:
                    highest, peak = total + entry[0], dict(now + Counter({Category.TEMPORARY: entry[0]}))
            else:
                now[categories[-entry - 1]] -= self._sizes[-entry - 1]
                total -= self._sizes[-entry - 1]
        if name:
            yield Moment(name, dict(now) if is_rising else peak, total)

    def _with_temporaries(self) -> list[Category]:
        categories = list(self._categories)
        born_in: dict[int, int] = {}
        moment = 0
        for entry in self._log:
            if isinstance(entry, str):
                moment += 1
            elif isinstance(entry, int):
                number = abs(entry) - 1
                if entry > 0:
                    born_in[number] = moment
                elif born_in[number] == moment and categories[number] is Category.ACTIVATIONS:
                    categories[number] = Category.TEMPORARY
        return categories
