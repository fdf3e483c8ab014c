"""What the actions of a schedule cost, in time and in activation memory."""

from dataclasses import dataclass

from .action import Action, Kind
from .placement import Placement
from .schedule import Shape

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Costs:
    """Costs by stage and segment: `table[stage][segment]`, any unit, the same for all times.

    `f`, `i`, `w` are the durations of F, I, W; a B takes i + w. `message_f` is the time from the
    end of an F until its output has arrived on the next stage's rank, `message_b` the same for the
    input gradient and the previous stage; both count only where the stages are on two ranks.
    `activation` is the memory that an F takes; `kept` is the part of it that stays after its I
    until its W.
    """

    f: Table
    i: Table
    w: Table
    message_f: Table
    message_b: Table
    activation: Table
    kept: Table

    @classmethod
    def uniform(cls, shape: Shape, f: float = 1.0, i: float = 1.0, w: float = 1.0, message: float = 0.0) -> "Costs":
        """Equal costs everywhere; memory counts the units in flight, from F to B or W."""

        def table(value: float) -> Table:
            return ((float(value),) * shape.num_segments,) * shape.num_stages

        messages = table(message)
        return cls(table(f), table(i), table(w), messages, messages, table(1), table(1))

    def check(self, shape: Shape) -> None:
        """Raises ValueError if a table does not fit the shape or holds a negative number."""
        for name, table in vars(self).items():
            sizes = len(table), {len(row) for row in table}
            if sizes != (shape.num_stages, {shape.num_segments}):
                raise ValueError(
                    f"cost table {name!r} must have {shape.num_stages} stages of {shape.num_segments} segments"
                )
            if any(value < 0 for row in table for value in row):
                raise ValueError(f"cost table {name!r} holds a negative number")
        for some, all_of_it in zip(self.kept, self.activation, strict=True):
            if any(part > whole for part, whole in zip(some, all_of_it, strict=True)):
                raise ValueError("cost table 'kept' is part of 'activation', it cannot be larger")

    def duration(self, kind: Kind, stage: int, segment: int) -> float:
        if kind is Kind.F:
            return self.f[stage][segment]
        if kind is Kind.W:
            return self.w[stage][segment]
        if kind is Kind.I:
            return self.i[stage][segment]
        return self.i[stage][segment] + self.w[stage][segment]

    def delay(self, needed: Action, action: Action, placement: Placement) -> float:
        """Time from the end of `needed` until `action`, which depends on it, may start."""
        if placement.rank_of(needed.stage) == placement.rank_of(action.stage):
            return 0.0
        table = self.message_f if needed.kind is Kind.F else self.message_b
        return table[needed.stage][needed.segment]
