"""How much activation memory a rank holds when it runs its actions in order."""

from collections.abc import Iterable

from .action import Action, Kind
from .costs import Costs
from .schedule import Schedule


def peak_units(actions: Iterable[Action]) -> int:
    """Most units in flight on a rank: a unit of a model chunk is, from its F to its B or W."""
    now = peak = 0
    for action in actions:
        if action.kind is Kind.F:
            now += 1
            peak = max(peak, now)
        elif action.kind in (Kind.B, Kind.W):
            now -= 1
    return peak


def memory_change(costs: Costs, kind: Kind, stage: int, segment: int) -> float:
    """What a compute action adds to the memory of its rank: F at its start, the rest at its end."""
    if kind is Kind.F:
        return costs.activation[stage][segment]
    if kind is Kind.I:
        return costs.kept[stage][segment] - costs.activation[stage][segment]
    if kind is Kind.W:
        return -costs.kept[stage][segment]
    return -costs.activation[stage][segment]


def peak_memory(schedule: Schedule, costs: Costs) -> list[float]:
    """For each rank the most activation memory held at once, in the unit of `costs.activation`."""
    peaks = []
    for actions in schedule.ranks:
        now = peak = 0.0
        for kind, stage, _, segment in actions:
            now += memory_change(costs, kind, stage, segment)
            peak = max(peak, now)
        peaks.append(peak)
    return peaks
