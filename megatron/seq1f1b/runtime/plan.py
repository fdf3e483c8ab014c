"""Which actions a rank runs in steps of any size."""

import hashlib
from collections.abc import Callable, Sequence

from ..schedule import FAMILIES, Action, Costs, Kind, Schedule, Shape, build, lower_rank, program
from ..schedule.validate import neighbourhood
from .program import Program

# What is left of a program in an evaluation; the order on every channel stays as it was.
_FORWARD_KINDS = (Kind.RECV_F, Kind.F, Kind.SEND_F)

# What the messages of a program serve, which a schedule leaves out.
_SERVED = {
    Kind.RECV_F: (Kind.F,),
    Kind.SEND_F: (Kind.F,),
    Kind.RECV_B: (Kind.B, Kind.I),
    Kind.SEND_B: (Kind.B, Kind.I),
}


class Plan:
    """The lowered actions of this rank, built when a step has a new shape.

    `schedule` is the name of a family, `auto`, or a whole schedule, which fits training steps of its own shape only.
    `auto` plans for the costs that `costs` gives for segments of certain lengths, equal ones if it is None.
    """

    def __init__(self, schedule: str | Schedule, costs: Callable[[Sequence[int]], Costs] | None = None) -> None:
        self._schedule = schedule
        self._costs = costs
        self._programs: dict[tuple[Shape, tuple[int, ...], int, bool], Program] = {}
        if isinstance(schedule, Schedule):
            self.name = f"a schedule of its own ({hashlib.sha256(str(schedule).encode()).hexdigest()[:16]})"
        else:
            self.name = schedule

    def program(self, shape: Shape, lengths: Sequence[int], rank: int, forward_only: bool) -> Program:
        """All that a rank does in one step, with segments of `lengths` tokens.

        Raises ValueError if the whole schedule has another shape.
        """
        key = shape, tuple(lengths), rank, forward_only
        if key not in self._programs:
            actions = self._evaluation(shape, rank) if forward_only else self._training(shape, lengths, rank)
            self._programs[key] = Program(actions)
        return self._programs[key]

    def around(self, shape: Shape, lengths: Sequence[int], rank: int, action: Action) -> str:
        """What all ranks do around an action of this one in a training step, for the message of a failure."""
        schedule = self._schedule
        if not isinstance(schedule, Schedule):
            schedule = build(schedule, shape, self._costs_of(lengths))
        order = schedule.ranks[rank]
        kinds = _SERVED.get(action.kind, (action.kind,))
        places = (i for i, other in enumerate(order) if other[1:] == action[1:] and other.kind in kinds)
        return neighbourhood(schedule, rank, [next(places, len(order) - 1)] * len(schedule.ranks))

    def _costs_of(self, lengths: Sequence[int]) -> Costs | None:
        return self._costs(lengths) if self._schedule == "auto" and self._costs is not None else None

    def _training(self, shape: Shape, lengths: Sequence[int], rank: int) -> list[Action]:
        if not isinstance(self._schedule, Schedule):
            return program(self._schedule, shape, rank, self._costs_of(lengths))
        if self._schedule.shape != shape:
            raise ValueError(f"the given schedule is for {self._schedule.shape}, not for {shape}")
        return lower_rank(shape, dict(enumerate(self._schedule.ranks)), rank)

    def _evaluation(self, shape: Shape, rank: int) -> list[Action]:
        """Any family will do, since only its order of forwards is left."""
        family = self._schedule if self._schedule in FAMILIES else "1f1b"
        return [action for action in program(family, shape, rank) if action.kind in _FORWARD_KINDS]
