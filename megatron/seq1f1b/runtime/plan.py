"""Which actions a rank runs in steps of any size."""

from collections.abc import Sequence

from ..schedule import Action, CostsOfLengths, Kind, ScheduleChoice, Shape
from ..schedule.validate import neighbourhood
from .program import Program

# The actions that remain in an evaluation; the order on every channel stays the same.
_FORWARD_KINDS = (Kind.RECV_F, Kind.F, Kind.SEND_F)

# The compute actions that each kind of message serves.
_SERVED = {
    Kind.RECV_F: (Kind.F,),
    Kind.SEND_F: (Kind.F,),
    Kind.RECV_B: (Kind.B, Kind.I),
    Kind.SEND_B: (Kind.B, Kind.I),
}


class Plan:
    """The lowered actions of this rank, built when a step has a new shape.

    A planned schedule is planned for `costs(lengths)` of segments of certain lengths, equal ones if `costs` is None.
    `one_queue`: all that a rank does passes through one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
    """

    def __init__(self, schedule: ScheduleChoice, costs: CostsOfLengths | None = None, one_queue: bool = False) -> None:
        self.name = schedule.name
        self.placement = schedule.placement
        self._schedule = schedule
        self._costs = costs
        self._one_queue = one_queue
        self._programs: dict[tuple[Shape, tuple[int, ...], int, bool], Program] = {}

    def program(self, shape: Shape, lengths: Sequence[int], rank: int, forward_only: bool) -> Program:
        """All that a rank does in one step, with segments of `lengths` tokens.

        Raises ValueError if the schedule is a given one of another shape.
        """
        key = shape, tuple(lengths), rank, forward_only
        if key not in self._programs:
            schedule = self._schedule.forwards() if forward_only else self._schedule
            actions = schedule.program(shape, rank, lengths, self._costs, self._one_queue)
            if forward_only:
                actions = [action for action in actions if action.kind in _FORWARD_KINDS]
            self._programs[key] = Program(actions)
        return self._programs[key]

    def around(self, shape: Shape, lengths: Sequence[int], rank: int, action: Action) -> str:
        """What all ranks do around an action of this one in a training step, for the message of a failure."""
        schedule = self._schedule.of_all_ranks(shape, lengths, self._costs)
        order = schedule.ranks[rank]
        kinds = _SERVED.get(action.kind, (action.kind,))
        places = (i for i, other in enumerate(order) if other[1:] == action[1:] and other.kind in kinds)
        return neighbourhood(schedule, rank, [next(places, len(order) - 1)] * len(schedule.ranks))
