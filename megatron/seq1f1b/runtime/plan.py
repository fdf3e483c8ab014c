"""Which actions a rank runs in steps of any size."""

import hashlib
from collections.abc import Callable, Sequence

from ..schedule import FAMILIES, Action, Costs, Kind, Schedule, Shape, program, program_of

# What is left of a program in an evaluation; the order on every channel stays as it was.
_FORWARD_KINDS = (Kind.RECV_F, Kind.F, Kind.SEND_F)


class Plan:
    """The lowered actions of this rank, built when a step has a new shape.

    `schedule` is the name of a family, `auto`, or a whole schedule, which fits training steps of its own shape only.
    `auto` plans for the costs that `costs` gives for segments of certain lengths, equal ones if it is None.
    `one_queue`: all that a rank does passes through one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
    """

    def __init__(
        self,
        schedule: str | Schedule,
        costs: Callable[[Sequence[int]], Costs] | None = None,
        one_queue: bool = False,
    ) -> None:
        self._schedule = schedule
        self._costs = costs
        self._one_queue = one_queue
        self._programs: dict[tuple[Shape, tuple[int, ...], int, bool], list[Action]] = {}
        if isinstance(schedule, Schedule):
            self.name = f"a schedule of its own ({hashlib.sha256(str(schedule).encode()).hexdigest()[:16]})"
        else:
            self.name = schedule

    def program(self, shape: Shape, lengths: Sequence[int], rank: int, forward_only: bool) -> list[Action]:
        """All that a rank does in one step, with segments of `lengths` tokens.

        Raises ValueError if the whole schedule has another shape.
        """
        key = shape, tuple(lengths), rank, forward_only
        if key not in self._programs:
            if forward_only:
                self._programs[key] = self._evaluation(shape, rank)
            else:
                self._programs[key] = self._training(shape, lengths, rank)
        return self._programs[key]

    def _training(self, shape: Shape, lengths: Sequence[int], rank: int) -> list[Action]:
        if not isinstance(self._schedule, Schedule):
            is_planned = self._schedule == "auto" and self._costs is not None
            costs = self._costs(lengths) if is_planned else None
            return program(self._schedule, shape, rank, costs, one_queue=self._one_queue)
        if self._schedule.shape != shape:
            raise ValueError(f"the given schedule is for {self._schedule.shape}, not for {shape}")
        return program_of(self._schedule, rank, self._one_queue)

    def _evaluation(self, shape: Shape, rank: int) -> list[Action]:
        """Any family will do, since only its order of forwards is left."""
        family = self._schedule if self._schedule in FAMILIES else "1f1b"
        actions = program(family, shape, rank, one_queue=self._one_queue)
        return [action for action in actions if action.kind in _FORWARD_KINDS]
