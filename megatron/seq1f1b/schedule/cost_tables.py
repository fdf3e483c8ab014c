"""The costs of actions, in time and in activation memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any

from .action import Action
from .kinds import COMPUTE_KINDS, Holds, Kind
from .schedule import Schedule, Shape

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Costs:
    """Costs by stage and segment, `table[stage][segment]`, in any unit, the same for all times.

    `f`, `i`, `w` are the durations of F, I, W; a B takes i + w. `message_f` is the time from the end of an F until its
    output has arrived on the next stage's rank, `message_b` the same for the input gradient and the previous stage;
    both count only where the stages are on two ranks. `activation` is the memory that an F takes, `activation_for_w`
    the part of it that stays after its I until its W.
    """

    f: Table
    i: Table
    w: Table
    message_f: Table
    message_b: Table
    activation: Table
    activation_for_w: Table

    @classmethod
    def uniform(cls, shape: Shape, f: float = 1.0, i: float = 1.0, w: float = 1.0, message: float = 0.0) -> "Costs":
        """Equal costs everywhere; memory counts the units in flight, from F to B or W."""

        def everywhere(value: float) -> Table:
            return ((float(value),) * shape.num_segments,) * shape.num_stages

        return cls(
            f=everywhere(f),
            i=everywhere(i),
            w=everywhere(w),
            message_f=everywhere(message),
            message_b=everywhere(message),
            activation=everywhere(1),
            activation_for_w=everywhere(1),
        )

    @classmethod
    def from_mapping(cls, shape: Shape, values: Mapping[str, Any]) -> "Costs":
        """Costs from `{"f": ..., "i": ..., "w": ..., "message": ..., "activation": ..., "activation_for_w": ...}`.

        Each value is a number, a list of one number for each segment, or a list of such lists for each stage. `message`
        stands for `message_f` and `message_b`; missing values are as in `uniform`, a missing `activation_for_w`
        equals `activation`. Raises ValueError for other names and sizes.
        """
        if not isinstance(values, Mapping):
            raise ValueError('costs are a table of names and numbers, such as {"f": 1, "message": [0.1, 0.2]}')
        given = dict(values)
        if "message" in given:
            message = given.pop("message")
            given = {"message_f": message, "message_b": message, **given}
        if "activation" in given:
            given.setdefault("activation_for_w", given["activation"])
        names = cls.__dataclass_fields__
        if unknown := given.keys() - names:
            raise ValueError(f"unknown cost {min(unknown)!r}; there are {', '.join(names)}, message")
        costs = replace(cls.uniform(shape), **{name: _table(shape, name, value) for name, value in given.items()})
        costs.check(shape)
        return costs

    def check(self, shape: Shape) -> None:
        """Raises ValueError if a table does not fit the shape, or holds a number that is negative or not finite."""
        for name, table in vars(self).items():
            if len(table) != shape.num_stages or any(len(row) != shape.num_segments for row in table):
                raise ValueError(
                    f"cost table {name!r} must have {shape.num_stages} stages of {shape.num_segments} segments"
                )
            if not all(0 <= value < inf for row in table for value in row):
                raise ValueError(f"cost table {name!r} holds a number that is negative or not finite")
        rows = zip(self.activation_for_w, self.activation, strict=True)
        if any(part > whole for for_w, activation in rows for part, whole in zip(for_w, activation, strict=True)):
            raise ValueError("cost table 'activation_for_w' is part of 'activation', it cannot be larger")

    def tables(self, kind: Kind) -> list[Table]:
        """The tables whose times an action of a kind takes, one after the other."""
        return [getattr(self, name) for name in kind.facts.costs]

    def duration(self, kind: Kind, stage: int, segment: int) -> float:
        return sum(table[stage][segment] for table in self.tables(kind))

    def held(self, holds: Holds) -> Table:
        """The memory of units that hold this."""
        if holds is Holds.ACTIVATIONS:
            return self.activation
        if holds is Holds.FOR_WEIGHTS:
            return self.activation_for_w
        return tuple((0.0,) * len(row) for row in self.activation)


def _table(shape: Shape, name: str, value: Any) -> Table:
    try:
        if not isinstance(value, list | tuple):
            value = [float(value)] * shape.num_segments
        if not isinstance(value[0], list | tuple):
            value = [value] * shape.num_stages
        return tuple(tuple(map(float, row)) for row in value)
    except (IndexError, OverflowError, TypeError, ValueError):
        raise ValueError(
            f"cost table {name!r} must be a number, a list of one for each segment, or such a list for each stage"
        ) from None


def memory_changes(costs: Costs) -> dict[Kind, Table]:
    """The change of a rank's memory at the start of an F or the end of a B, I or W, by kind of compute action."""
    changes = {}
    for kind in COMPUTE_KINDS:
        rows = zip(costs.held(kind.facts.before), costs.held(kind.facts.after), strict=True)
        changes[kind] = tuple(_differences(before, after) for before, after in rows)
    return changes


def _differences(before: Sequence[float], after: Sequence[float]) -> tuple[float, ...]:
    return tuple(later - earlier for earlier, later in zip(before, after, strict=True))


def peak_memory(schedule: Schedule, costs: Costs) -> list[float]:
    """The most activation memory that each rank holds at once if nothing moves, in the unit of `costs.activation`."""
    changes = memory_changes(costs)
    peaks = []
    for actions in schedule.ranks:
        of_rank = (changes[kind][stage][segment] for kind, stage, _, segment in actions if kind in changes)
        peaks.append(max(accumulate(of_rank, initial=0.0)))
    return peaks


def sequences_held(actions: Iterable[Action], shape: Shape) -> float:
    """The most activations that a rank holds at once, in whole micro-batches of all its layers. A unit is one of k * C
    equal parts, with the largest k, held from its F to its B or W, except from OFFLOAD to RELOAD."""
    changes = {kind: kind.facts.after.is_counted - kind.facts.before.is_counted for kind in Kind}
    peak = max(accumulate((changes[action.kind] for action in actions), initial=0))
    return peak / (shape.num_segments * shape.num_chunks)
