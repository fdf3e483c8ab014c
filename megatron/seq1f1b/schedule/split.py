"""The zero-bubble split of the backward into its input-gradient and weight-gradient halves."""

from collections import deque
from collections.abc import Iterable

from .action import Action, Kind


def split_backward(actions: Iterable[Action], lag: int) -> list[Action]:
    """Every B becomes an I, and its W follows `lag` such I later on this rank.

    The W come in the order of the I, so with segments in descending order too. Nothing else waits
    for a W, so this cannot close a cycle.
    """
    result: list[Action] = []
    pending: deque[Action] = deque()
    for action in actions:
        kind, *unit = action
        if kind is not Kind.B:
            result.append(action)
            continue
        result.append(Action(Kind.I, *unit))
        pending.append(Action(Kind.W, *unit))
        if len(pending) > lag:
            result.append(pending.popleft())
    result += pending
    return result
