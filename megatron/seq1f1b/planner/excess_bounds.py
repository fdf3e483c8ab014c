"""How long a step of 1F1B takes at least if its first rank holds more than fits on the device."""

from operator import add
from typing import NamedTuple

from ..costs.layer_bytes import moved_bytes
from ..costs.machine import Machine
from ..costs.stage_times import Row, stage_rows, step_end
from ..costs.training_setup import TrainingSetup
from .first_backward import backwards_like_the_first, of_first_units, units_at_first_backward
from .memory_bounds import excess_of_first
from .pair_bounds import most_hidden
from .rank_ends import CopyTimes
from .space import MemoryBudget


class _Chunk(NamedTuple):
    """Seconds of the units of a chunk, by segment, and the number of units that it holds at its first backward."""

    forward: Row
    backward: Row
    held: int


def copy_times(setup: TrainingSetup, machine: Machine, budget: MemoryBudget, by_layer: bool) -> CopyTimes | None:
    """The copies of what does not fit on the first rank during its first backward and later ones like it, of which no
    two hold the same units; None if all fits. Units move as a whole, or `by_layer`."""
    excess = excess_of_first(setup, len(setup.segments), budget.device)
    if excess <= 0:
        return None
    rows = stage_rows(setup, machine)
    stages = setup.placement.stages_of(0)
    copying = excess / budget.bandwidth
    if by_layer:
        # Copies begin when the first layer has run, and one more layer than memory counts may still be leaving. The
        # unit of a backward, which is the last segment on the last chunk, comes back within it.
        _, inputs, weights = rows[stages[-1]]
        begins = -_largest_layer(setup) / budget.bandwidth
        returning = copying - (inputs[-1] + weights[-1])
    else:
        forward, _, _ = rows[stages[0]]
        begins = forward[0]
        returning = copying
    times = len(backwards_like_the_first(setup.shape, setup.has_pairs))
    return CopyTimes(tuple(begins + number * copying for number in range(1, times + 1)), returning)


def least_seconds_with_copies(setup: TrainingSetup, machine: Machine, copies: CopyTimes | None) -> float:
    """A lower bound from the first rank of 1F1B: from its compute, and from `copies` that are not hidden by forwards
    before them, or by what is left to compute after them."""
    end = step_end(setup, machine, 0)
    chunks = _chunks_of_first_rank(setup, machine)
    seconds = setup.num_microbatches * sum(sum(chunk.forward) + sum(chunk.backward) for chunk in chunks)
    seconds -= most_hidden(setup, machine)[0]
    if copies is not None:
        forwards_before = sum(of_first_units(chunk.forward, chunk.held) for chunk in chunks)
        seconds += max(0.0, copies.leaving[0] - forwards_before)
        seconds += max(0.0, copies.returning - _compute_after_last_full(setup, chunks))
    return seconds + end.reduce + end.update + end.gather + machine.host.step


def _chunks_of_first_rank(setup: TrainingSetup, machine: Machine) -> list[_Chunk]:
    rows = stage_rows(setup, machine)
    held = units_at_first_backward(setup.family, setup.shape, setup.has_pairs)
    chunks = []
    for stage, units in zip(setup.placement.stages_of(0), held, strict=True):
        forward, inputs, weights = rows[stage]
        chunks.append(_Chunk(forward, tuple(map(add, inputs, weights)), units))
    return chunks


def _largest_layer(setup: TrainingSetup) -> float:
    """The most bytes of a layer of a unit that move from the first rank."""
    moved = moved_bytes(setup)
    layers = setup.layers_per_stage
    return max(max(moved[stage]) / max(1, layers[stage]) for stage in setup.placement.stages_of(0))


def _compute_after_last_full(setup: TrainingSetup, chunks: list[_Chunk]) -> float:
    """The compute of the first rank after the last backward during which it holds as much as during the first. The
    backwards before it are of whole micro-batches, of all chunks; it is of the last segment on the last chunk."""
    number = backwards_like_the_first(setup.shape, setup.has_pairs)[-1]
    units_before = number // len(chunks)
    num_units = setup.shape.num_units
    seconds = -chunks[-1].backward[-1]
    for chunk in chunks:
        seconds += of_first_units(chunk.forward, num_units) - of_first_units(chunk.forward, units_before + chunk.held)
        seconds += of_first_units(chunk.backward, num_units) - of_first_units(chunk.backward, units_before)
    return seconds
