"""What one rank does in a step, and what follows from it."""

from collections.abc import Sequence

from ..schedule import Action, Kind


class Program:
    """The lowered actions of one rank, and what follows from them, computed once instead of in every step.

    `splits_backwards`: some backward has an input-gradient and a weight-gradient half. `ends`: for each chunk the
    last action that gives input gradients, as (I, action), and the last that gives weight gradients, as (W, action).
    `another_goes_backward_first`: the first forward of a chunk and its first weight gradient are of different units, as
    with segments.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = tuple(actions)
        self.splits_backwards = any(action.kind is Kind.W for action in self.actions)
        self.ends = frozenset(_ends(self.actions))
        self.another_goes_backward_first = _another_goes_backward_first(self.actions)


def _ends(actions: Sequence[Action]) -> set[tuple[Kind, Action]]:
    ends = set()
    for half in (Kind.I, Kind.W):
        last = {action.stage: action for action in actions if action.kind in (Kind.B, half)}
        ends.update((half, action) for action in last.values())
    return ends


def _another_goes_backward_first(actions: Sequence[Action]) -> bool:
    firsts: dict[int, Action] = {}
    seen = set()
    for action in actions:
        if action.kind is Kind.F:
            firsts.setdefault(action.stage, action)
        elif action.kind in (Kind.B, Kind.W) and action.stage not in seen:
            seen.add(action.stage)
            if firsts[action.stage] != action._replace(kind=Kind.F):
                return True
    return False
