"""Moves of activations to the memory of the host and back, as actions of a rank.

A unit leaves before the next compute action after its forward (OFFLOAD), and starts back AHEAD compute actions before
its backward (RELOAD), so both copies overlap with compute; a pair counts as one action. Where messages wait for their
turn, it may leave before its output is sent; what is still to be sent stays on the device. Its device memory is freed
when the next unit leaves, by which time the copy has usually ended, or at the latest when it starts back.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from heapq import heappop, heappush

from .action import Action, Unit
from .kinds import COMPUTE_KINDS, Kind
from .schedule import Schedule, places

# A unit starts back this many compute actions ahead of its backward.
AHEAD = 2
# The fewest compute actions from the forward to the backward of a unit that moves: it leaves, stays away, comes back.
SHORTEST = 2 * AHEAD + 2
# The same where layers move one by one: the first layer starts back beside the action before its backward, and the last
# ones leave beside the action after their forward.
AHEAD_BY_LAYER = 1
SHORTEST_BY_LAYER = 2


def units_to_move(
    order: Sequence[Action], share: float, paired: Set[Action] = frozenset(), by_layer: bool = False
) -> frozenset[Unit]:
    """The fewest units to move so that the peak of units on a rank falls by `share`, or by less if few backwards are
    late. Whenever the rank would hold too many, the unit with the farthest backward moves (Belady, IBM Systems Journal
    5(2), 1966). `order` holds compute actions only, of which those in `paired` run beside the next. Raises ValueError
    for a share that is not between 0 and 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"--offload-activations {share:g} is not between 0 and 1")
    shortest = SHORTEST_BY_LAYER if by_layer else SHORTEST
    numbered = [(number, action) for number, place in enumerate(places(order, paired)) for action in place]
    backward_of = {action.unit: number for number, action in numbered if action.kind.facts.gives_input_gradient}
    most_on_device = round((1 - share) * _most_held(order))
    moved: set[Unit] = set()
    num_on_device = 0
    # Units on the device that may move, with the number of their backward, negative: the farthest comes first.
    movable: list[tuple[int, Unit]] = []
    for number, action in numbered:
        unit = action.unit
        if action.kind is Kind.F:
            num_on_device += 1
            if backward_of[unit] - number >= shortest:
                heappush(movable, (-backward_of[unit], unit))
            if num_on_device > most_on_device and movable:
                negative, farthest = movable[0]
                if -negative > number:  # else it has gone backward by now, as have all others
                    heappop(movable)
                    moved.add(farthest)
                    num_on_device -= 1
        elif action.kind.facts.gives_input_gradient and unit not in moved:
            num_on_device -= 1
    return frozenset(moved)


def _most_held(order: Sequence[Action]) -> int:
    """The most units that a rank holds at once: each from its forward to its backward."""
    held = 0
    most = 0
    for action in order:
        if action.kind is Kind.F:
            held += 1
        elif action.kind.facts.gives_input_gradient:
            held -= 1
        most = max(most, held)
    return most


def with_moves(
    actions: Sequence[Action], units: Collection[Unit], paired: Set[Action] = frozenset(), by_layer: bool = False
) -> list[Action]:
    """The actions of a rank, lowered or not, with the moves of `units`, which come from `units_to_move`."""
    ahead = AHEAD_BY_LAYER if by_layer else AHEAD
    order = places([action for action in actions if action.kind in COMPUTE_KINDS], paired)
    before = defaultdict(list)  # the moves to add in front of an action
    for number, place in enumerate(order):
        for action in place:
            if action.unit not in units:
                continue
            if action.kind is Kind.F:
                before[order[number + 1][0]].append(Action(Kind.OFFLOAD, *action.unit))
            elif action.kind.facts.gives_input_gradient:
                before[order[number - ahead][0]].append(Action(Kind.RELOAD, *action.unit))
    result: list[Action] = []
    for action in actions:
        result += before.get(action, ())
        result.append(action)
    return result


def moved(schedule: Schedule, share: float, by_layer: bool = False) -> Schedule:
    """A schedule of compute actions with the moves of all ranks; see `units_to_move`."""
    if not share:
        return schedule
    paired = schedule.paired
    ranks = []
    for order in schedule.ranks:
        units = units_to_move(order, share, paired, by_layer)
        ranks.append(tuple(with_moves(order, units, paired, by_layer)))
    return replace(schedule, ranks=tuple(ranks))
