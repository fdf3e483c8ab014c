"""The choice of a schedule: a named family, a plan for given costs, or a schedule given by the user.

Tested in arguments/test_config.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

from .automatic import auto
from .clock import Clock
from .cost_tables import Costs
from .families import FAMILIES, PAIRED, clock_of
from .kinds import Kind
from .schedule import Placement, Schedule, Shape

CostsOfLengths = Callable[[Sequence[int]], Costs]
"""The costs of actions by the lengths of the segments in tokens."""

FAMILY_NAMES = (*FAMILIES, "auto")
"""The values of --pipeline-schedule."""


def build(
    family: str,
    shape: Shape,
    costs: Costs | None = None,
    limits: float | Sequence[float] | None = None,
    pairs: bool = False,
) -> Schedule:
    """The compute actions of all ranks. Only `auto` uses the costs and the activation memory limits. Raises ValueError
    for a family that is not known, or has no `pairs`."""
    if pairs:
        if family not in PAIRED:
            raise ValueError(f"{family} has no forwards beside backwards; choose one of {', '.join(PAIRED)}")
        return PAIRED[family](shape).schedule()
    if family == "auto":
        return auto(shape, costs, limits)
    if family not in FAMILIES:
        raise ValueError(f"unknown schedule {family!r}; choose one of {', '.join(FAMILY_NAMES)}")
    return FAMILIES[family](shape).schedule()


@dataclass(frozen=True)
class ScheduleChoice:
    """The source of a step's schedule: one of `FAMILY_NAMES`, or a `given` schedule. `placement` is the style of a
    Placement. Without `split`, `auto` leaves every backward whole. With `pairs` the orders of a family are those of
    `PAIRED`."""

    name: str
    placement: str = "looped"
    split: bool = True
    pairs: bool = False
    given: Schedule | None = None

    @classmethod
    def of(cls, given: Schedule) -> Self:
        """A whole schedule, for steps of its own shape only. Different schedules have different names."""
        name = f"a schedule of its own ({given.digest})"
        return cls(name, given.shape.placement.style, pairs=bool(given.paired), given=given)

    @property
    def title(self) -> str:
        """The name in messages, traces and pictures."""
        return f"{self.name} in pairs" if self.pairs else self.name

    @property
    def is_auto(self) -> bool:
        """Whether the schedule is searched for with the costs of a step."""
        return self.name == "auto"

    @cached_property
    def splits_backwards(self) -> bool:
        """Whether the actions may include W."""
        if self.given is not None:
            return any(action.kind is Kind.W for actions in self.given.ranks for action in actions)
        if self.is_auto:
            return self.split
        of_any_shape = FAMILIES[self.name](Shape(Placement(2), 2))
        return of_any_shape.lag is not None

    @property
    def has_moves(self) -> bool:
        """Whether the given schedule contains moves of activations."""
        return self.given is not None and self.given.has_moves

    @cached_property
    def keeps_order(self) -> bool:
        """Whether every stage runs the forwards of micro-batches in their order, in which programs read them."""
        if self.given is None:
            return True
        newest: dict[int, int] = {}  # the micro-batch that went forward last, by stage
        for action in chain.from_iterable(self.given.ranks):
            if action.kind is Kind.F:
                if action.microbatch < newest.get(action.stage, 0):
                    return False
                newest[action.stage] = action.microbatch
        return True

    def resolve(self, shape: Shape, lengths: Sequence[int], costs: CostsOfLengths | None) -> Clock | Schedule:
        """The schedule of a step with segments of `lengths` tokens, the same on every rank; `auto` plans for equal
        costs if `costs` is None. Raises ValueError if a given schedule has another shape."""
        if self.given is not None:
            if self.given.shape != shape:
                raise ValueError(f"the given schedule is for {self.given.shape}, not for {shape}")
            return self.given
        if self.is_auto:
            return auto(shape, None if costs is None else costs(lengths), split=self.split)
        return clock_of(self.name, shape, self.pairs)


def splitting_families() -> list[str]:
    """The names in `FAMILY_NAMES` of schedules that split backwards."""
    return [name for name in FAMILY_NAMES if ScheduleChoice(name).splits_backwards]
