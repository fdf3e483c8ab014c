"""Which schedule runs: a named family, one that is planned for given costs, or one of the user's own.

All three give the program of a rank in the same way, so the runtime need not distinguish them.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .action import Action, Kind
from .auto import auto
from .build import FAMILY_NAMES, build, program, program_of
from .costs import Costs
from .families import FAMILIES
from .placement import Placement
from .schedule import Schedule, Shape

CostsOfLengths = Callable[[Sequence[int]], Costs]


@dataclass(frozen=True)
class Named:
    """A schedule of `FAMILIES`, by its name; `placement` is the style of a Placement."""

    name: str
    placement: str = "looped"

    def __post_init__(self) -> None:
        if self.name not in FAMILIES:
            raise ValueError(f"unknown schedule {self.name!r}; choose one of {', '.join(FAMILY_NAMES)}")

    @cached_property
    def splits_backwards(self) -> bool:
        """Whether its actions have W, as in one small pipeline so in all."""
        return any(map(has_weight_gradients, build(self.name, Shape(Placement(2), num_microbatches=2)).ranks))

    def program(
        self,
        shape: Shape,
        rank: int,
        lengths: Sequence[int],
        costs: CostsOfLengths | None,
        one_queue: bool = False,
    ) -> list[Action]:
        """The lowered actions of a rank in a training step with segments of `lengths` tokens.

        `one_queue` is that of `program`.
        """
        return program(self.name, shape, rank, one_queue=one_queue)

    def of_all_ranks(self, shape: Shape, lengths: Sequence[int], costs: CostsOfLengths | None) -> Schedule:
        """The same step as one schedule, not lowered."""
        return build(self.name, shape)

    def forwards(self) -> "Named":
        """The family whose order of forwards an evaluation follows."""
        return self


class _Whole(ABC):
    """A schedule that is made for all ranks at once."""

    @abstractmethod
    def of_all_ranks(self, shape: Shape, lengths: Sequence[int], costs: CostsOfLengths | None) -> Schedule:
        """As of a `Named`."""

    def program(
        self,
        shape: Shape,
        rank: int,
        lengths: Sequence[int],
        costs: CostsOfLengths | None,
        one_queue: bool = False,
    ) -> list[Action]:
        """As of a `Named`; raises ValueError as `of_all_ranks` does."""
        return program_of(self.of_all_ranks(shape, lengths, costs), rank, one_queue)

    def forwards(self) -> Named:
        """As of a `Named`."""
        return Named("1f1b")


@dataclass(frozen=True)
class Planned(_Whole):
    """`auto`: the best schedule found for the costs of a step. Without `split` no backward is split into I and W."""

    split: bool = True
    placement: str = "looped"
    name = "auto"

    @property
    def splits_backwards(self) -> bool:
        """Whether it may have W."""
        return self.split

    def of_all_ranks(self, shape: Shape, lengths: Sequence[int], costs: CostsOfLengths | None) -> Schedule:
        """As of a `Named`; planned for equal costs if `costs` is None. Every rank comes to the same plan."""
        return auto(shape, None if costs is None else costs(lengths), split=self.split)


@dataclass(frozen=True)
class Given(_Whole):
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
        return any(map(has_weight_gradients, self.schedule.ranks))

    def of_all_ranks(self, shape: Shape, lengths: Sequence[int], costs: CostsOfLengths | None) -> Schedule:
        """As of a `Named`; raises ValueError if the schedule has another shape."""
        if self.schedule.shape != shape:
            raise ValueError(f"the given schedule is for {self.schedule.shape}, not for {shape}")
        return self.schedule


ScheduleChoice = Named | Planned | Given


def choose(name: str, placement: str = "looped") -> Named | Planned:
    """The schedule of this name, one of `FAMILY_NAMES`; raises ValueError for another."""
    return Planned(placement=placement) if name == "auto" else Named(name, placement)


def has_weight_gradients(actions: Sequence[Action]) -> bool:
    """Whether there is a W, so that backwards are split."""
    return any(action.kind is Kind.W for action in actions)


def splitting_families() -> list[str]:
    """Those of `FAMILY_NAMES` that split backwards."""
    return [name for name in FAMILY_NAMES if choose(name).splits_backwards]
