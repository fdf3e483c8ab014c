"""`--sequence-splits auto`: the number of segments of the shortest predicted step that fits the device."""

from math import inf

from ..planning.costs.machine import Machine
from ..schedule import ScheduleChoice
from .forecast import Forecast, forecast
from .sequence_partition import SequencePartition

# A number between two of these makes a step at most a few percent shorter.
_CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Below this length, in tokens, the kernels of a GPU slow down, which only the formulas of a machine account for.
_SAFE_LENGTH = 1024
# The rest of a device is for what no formula counts: the context, communicators, workspaces, fragments.
_USABLE = 0.9


def best_num_segments(partition: SequencePartition, schedule: ScheduleChoice, machine: Machine, memory: float) -> int:
    """The number for a device of `machine` with `memory` bytes; where nothing fits, the one that needs least.

    With more segments bubble and memory shrink, but every action has its overhead, so that from some number on steps
    only become longer; the search ends there. Raises ValueError if the sequence cannot be cut at all.
    """
    found: dict[int, Forecast] = {}
    for count in _candidates(partition):
        try:
            lengths = partition.cut(partition.run.sequence_length, count)
        except ValueError:
            if not found:
                raise
            break
        found[count] = forecast(partition, schedule, lengths, machine)
        *_, before, last = (inf, inf, *(each.seconds for each in found.values()))
        if last > before > min(each.seconds for each in found.values()) and _fits(found, memory):
            break
    fitting = _fits(found, memory)
    if not fitting:
        return min(found, key=lambda count: found[count].total_bytes or 0.0)
    return min(fitting, key=lambda count: found[count].seconds)


def _candidates(partition: SequencePartition) -> list[int]:
    """Numbers whose segments are long enough on average; one segment always is."""
    least = max(_SAFE_LENGTH if partition.profile is None else 1, partition.throughput.full_speed_rows)
    most = partition.run.sequence_length // least
    return [count for count in _CANDIDATES if count <= max(1, most)]


def _fits(found: dict[int, Forecast], memory: float) -> list[int]:
    """The numbers whose steps fit in memory; all of them where its size is unknown."""
    return [count for count, each in found.items() if each.total_bytes is None or each.total_bytes <= _USABLE * memory]
