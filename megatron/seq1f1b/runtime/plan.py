"""Which actions a rank runs in steps of any size."""

import hashlib

from ..schedule import FAMILIES, Action, Kind, Schedule, Shape, lower_rank, program

# What is left of a program in an evaluation; the order on every channel stays as it was.
_FORWARD_KINDS = (Kind.RECV_F, Kind.F, Kind.SEND_F)


class Plan:
    """The lowered actions of this rank, built when a step has a new shape.

    `schedule` is the name of a family, `auto`, or a whole schedule, which fits training steps of its own shape only.
    """

    def __init__(self, schedule: str | Schedule) -> None:
        self._schedule = schedule
        self._programs: dict[tuple[Shape, int, bool], list[Action]] = {}
        if isinstance(schedule, Schedule):
            self.name = f"a schedule of its own ({hashlib.sha256(str(schedule).encode()).hexdigest()[:16]})"
        else:
            self.name = schedule

    def program(self, shape: Shape, rank: int, forward_only: bool) -> list[Action]:
        """All that a rank does in one step. Raises ValueError if the whole schedule has another shape."""
        key = shape, rank, forward_only
        if key not in self._programs:
            build = self._evaluation if forward_only else self._training
            self._programs[key] = build(shape, rank)
        return self._programs[key]

    def _training(self, shape: Shape, rank: int) -> list[Action]:
        if not isinstance(self._schedule, Schedule):
            return program(self._schedule, shape, rank)
        if self._schedule.shape != shape:
            raise ValueError(f"the given schedule is for {self._schedule.shape}, not for {shape}")
        return lower_rank(shape, dict(enumerate(self._schedule.ranks)), rank)

    def _evaluation(self, shape: Shape, rank: int) -> list[Action]:
        """Any family will do, since only its order of forwards is left."""
        family = self._schedule if self._schedule in FAMILIES else "1f1b"
        return [action for action in program(family, shape, rank) if action.kind in _FORWARD_KINDS]
