"""How much of the exchange of experts pairs hide at most, without the order of a rank."""

from collections.abc import Sequence
from functools import lru_cache

from ..costs.machine import Machine
from ..costs.pair_times import exchanges
from ..costs.training_setup import TrainingSetup
from ..schedule import Shape
from ..schedule.clock import smallest_group


def most_hidden(setup: TrainingSetup, machine: Machine) -> list[float]:
    """Seconds of a step, by rank. Units that run alone hide nothing."""
    shape = setup.shape
    if not setup.has_pairs:
        return [0.0] * shape.num_ranks
    hidden = exchanges(setup, machine).most_hidden_before
    of_ranks = []
    for rank, alone in enumerate(units_alone(shape)):
        stages = zip(shape.placement.stages_of(rank), alone, strict=True)
        of_ranks.append(sum(_in_pairs(hidden[stage], shape, number) for stage, number in stages))
    return of_ranks


def _in_pairs(before: Sequence[float], shape: Shape, alone: int) -> float:
    """What all units of a stage but those `alone` hide, by what the segments before each segment hide. Alone are whole
    micro-batches, and the first segments of another."""
    microbatches, segments = divmod(alone, shape.num_segments)
    return (shape.num_microbatches - microbatches) * before[-1] - before[segments]


@lru_cache(maxsize=4096)
def units_alone(shape: Shape) -> list[list[int]]:
    """How many forwards of each rank run alone at least, by chunk, and as many backwards: the forwards before its first
    pair (`one_f_one_b` in schedule/families.py), in the turns of its looped chunks."""
    units = shape.num_units
    turn = units if shape.num_chunks == 1 else smallest_group(shape)
    turns = [min(turn, units - first) for first in range(0, units, turn)]
    of_ranks = []
    for rank in range(shape.num_ranks):
        ranks_behind = shape.num_ranks - 1 - rank
        left = (shape.num_chunks - 1) * turns[0] + min(units, shape.num_segments + 2 * ranks_behind)
        by_chunk = [0] * shape.num_chunks
        for units_of_turn in turns:
            for chunk in range(shape.num_chunks):
                taken = min(units_of_turn, left)
                by_chunk[chunk] += taken
                left -= taken
        of_ranks.append(by_chunk)
    return of_ranks
