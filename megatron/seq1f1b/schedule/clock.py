"""From a clock to the program of a rank.

A family is described by a clock: a nominal tick for every action. A rank runs its actions in the
order of their ticks. If every action has a later tick than its dependencies, following first a
dependency and then the order of a rank never leads back in time, so the schedule has no cycle and
cannot deadlock, whatever the real durations are. Nobody waits for a tick: it only sorts.

The backward pass is the mirror image of the forward pass: the j-th unit in backward order at a
stage does what the j-th unit in forward order does at the stage as far from the other end.
So a clock is one function and one number.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

from .action import Action, Kind
from .schedule import Shape

# A tuple is an Action without a call of Python code; it makes large schedules four times faster.
_action = partial(tuple.__new__, Action)


def by_clock(
    shape: Shape, rank: int, tick: Callable[[int, int], int], turn: int
) -> list[Action]:
    """The F and B actions of one rank, in the order of their ticks.

    `tick(unit, stage)` is the tick of a forward; it must grow with the stage and with the
    segment. The backward of the j-th unit in backward order (micro-batches ascending, segments
    descending) at a stage has the tick `turn + tick(j, last_stage - stage)`.
    """
    microbatches, segments = range(shape.num_microbatches), range(shape.num_segments)
    units, last_stage = range(shape.num_units), shape.num_stages - 1
    actions: list[Action] = []
    ticks: list[int] = []
    for stage in shape.placement.stages_of(rank):
        actions += map(_action, product([Kind.F], [stage], microbatches, segments))
        ticks += [tick(unit, stage) for unit in units]
        actions += map(_action, product([Kind.B], [stage], microbatches, reversed(segments)))
        ticks += [turn + tick(unit, last_stage - stage) for unit in units]
    order = sorted(range(len(actions)), key=ticks.__getitem__)
    return [actions[index] for index in order]
