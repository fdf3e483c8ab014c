"""Which schedule runs: a named family, one that is planned for given costs, or one of the user's own.

All three give the schedule of a step in the same way, so the runtime need not distinguish them.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .action import Kind
from .automatic import auto
from .clock import Clock
from .cost_tables import Costs
from .families import FAMILIES
from .schedule import Placement, Schedule, Shape

CostsOfLengths = Callable[[Sequence[int]], Costs]

# The values of --pipeline-schedule.
FAMILY_NAMES = (*FAMILIES, "auto")


def build(
    family: str,
    shape: Shape,
    costs: Costs | None = None,
    limits: float | Sequence[float] | None = None,
) -> Schedule:
    """The compute actions of all ranks. Raises ValueError for an unknown family.

    Only `auto` looks at the costs and at the limits of activation memory, see there.
    """
    if family == "auto":
        return auto(shape, costs, limits)
    return Named(family).plan(shape, (), None).schedule()


@dataclass(frozen=True)
class Named:
    """A schedule of `FAMILIES`, by its name; `placement` is the style of a Placement."""

    name: str
    placement: str = "looped"

    def __post_init__(self) -> None:
        if self.name not in FAMILIES:
            raise ValueError(f"unknown schedule {self.name!r}; choose one of {', '.join(FAMILY_NAMES)}")

    @property
    def splits_backwards(self) -> bool:
        """Whether its actions have W, as in one small pipeline so in all."""
        return FAMILIES[self.name](Shape(Placement(2), num_microbatches=2)).lag is not None

    def plan(self, shape: Shape, lengths: Sequence[int], costs: CostsOfLengths | None) -> Clock:
        """What ranks compute in a training step with segments of `lengths` tokens."""
        return FAMILIES[self.name](shape)


@dataclass(frozen=True)
class Planned:
    """`auto`: the best schedule found for the costs of a step. Without `split` no backward is split into I and W."""

    split: bool = True
    placement: str = "looped"
    name = "auto"

    @property
    def splits_backwards(self) -> bool:
        """Whether it may have W."""
        return self.split

    def plan(self, shape: Shape, lengths: Sequence[int], costs: CostsOfLengths | None) -> Schedule:
        """As of a `Named`; planned for equal costs if `costs` is None. Every rank comes to the same plan."""
        return auto(shape, None if costs is None else costs(lengths), split=self.split)


@dataclass(frozen=True)
class Given:
    """A whole schedule, which fits training steps of its own shape only."""

    schedule: Schedule

    @cached_property
    def name(self) -> str:
        """Different for different schedules."""
        return f"a schedule of its own ({hashlib.sha256(str(self.schedule).encode()).hexdigest()[:16]})"

    @property
    def placement(self) -> str:
        """The style of its Placement."""
        return self.schedule.shape.placement.style

    @cached_property
    def splits_backwards(self) -> bool:
        """Whether it has W."""
        return any(action.kind is Kind.W for actions in self.schedule.ranks for action in actions)

    def plan(self, shape: Shape, lengths: Sequence[int], costs: CostsOfLengths | None) -> Schedule:
        """As of a `Named`; raises ValueError if the schedule has another shape."""
        if self.schedule.shape != shape:
            raise ValueError(f"the given schedule is for {self.schedule.shape}, not for {shape}")
        return self._compute

    @cached_property
    def has_moves(self) -> bool:
        """Whether it has OFFLOAD."""
        return self.schedule.has_moves

    @cached_property
    def _compute(self) -> Schedule:
        return self.schedule.without_moves()


ScheduleChoice = Named | Planned | Given


def choose(name: str, placement: str = "looped") -> Named | Planned:
    """The schedule of this name, one of `FAMILY_NAMES`; raises ValueError for another."""
    return Planned(placement=placement) if name == "auto" else Named(name, placement)


def splitting_families() -> list[str]:
    """Those of `FAMILY_NAMES` that split backwards."""
    return [name for name in FAMILY_NAMES if choose(name).splits_backwards]
