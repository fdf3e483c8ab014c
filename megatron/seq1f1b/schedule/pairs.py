"""Pairs: a forward and a backward of two units that a rank runs beside each other, layer by layer, so that experts'
exchange of the one passes while the other computes.

A pair is two actions at one place of an order, written `2F3.1|2B1.0`: a forward, and the backward (B or I) directly
after it. It starts when the needs of both have ended, and both end with it. So a unit takes a whole pair from stage to
stage in each direction, and on the last stage the backward of a unit comes a pair after its forward at the earliest.
`families.PAIRED` has orders for that.
"""

from collections.abc import Sequence

from .action import Action
from .dependencies import dependencies, outcome
from .kinds import Kind
from .schedule import Schedule


def with_pairs(schedule: Schedule) -> Schedule:
    """A valid schedule of compute actions with pairs wherever a backward directly follows a forward, except where the
    ranks would then wait for one another."""
    shape = schedule.shape
    paired: set[Action] = set()
    ended: set[Action] = set()
    positions = [0] * len(schedule.ranks)

    def can_run(actions: Sequence[Action]) -> bool:
        return all(ended.issuperset(dependencies(action, shape)) for action in actions)

    def run(rank: int, actions: Sequence[Action]) -> None:
        ended.update(map(outcome, actions))
        positions[rank] += len(actions)

    def ahead(rank: int) -> Sequence[Action]:
        """The next two actions if they may be a pair, else the next one."""
        two = schedule.ranks[rank][positions[rank] : positions[rank] + 2]
        return two if _may_be_pair(two) else two[:1]

    has_run = True
    while has_run:
        has_run = False
        for rank in range(len(schedule.ranks)):
            actions = ahead(rank)
            while actions and can_run(actions):
                paired.update(actions[:-1])  # the forward, if there are two
                run(rank, actions)
                has_run = True
                actions = ahead(rank)
        if not has_run:
            # Every rank is at its end or at two actions of which one waits. In a valid schedule some forward can run.
            for rank in range(len(schedule.ranks)):
                forward = ahead(rank)[:1]
                if forward and can_run(forward):
                    run(rank, forward)
                    has_run = True
                    break
    return Schedule(shape, schedule.ranks, frozenset(paired))


def _may_be_pair(actions: Sequence[Action]) -> bool:
    if len(actions) < 2:
        return False
    forward, backward = actions
    return forward.kind is Kind.F and backward.kind.facts.gives_input_gradient and forward.unit != backward.unit
