"""How long a step of 1F1B takes at least if its first rank holds more than fits on the device."""

from operator import add
from typing import NamedTuple

from ..costs.layer_bytes import moved_bytes
from ..costs.machine import Machine
from ..costs.stage_times import Row, stage_rows, step_end
from ..costs.training_setup import TrainingSetup
from .bounds import least_bytes
from .first_backward import backwards_like_the_first, units_at_first_backward
from .pair_bounds import most_hidden
from .space import MemoryBudget


class _Chunk(NamedTuple):
    """Seconds of the units of a chunk, by segment, and the number of units that it holds at its first backward."""

    forward: Row
    backward: Row
    held: int


def least_seconds_with_excess(setup: TrainingSetup, machine: Machine, budget: MemoryBudget, by_layer: bool) -> float:
    """A lower bound from the first rank: from its compute, and from copies to its host and back that this compute is
    too short to hide. What exceeds its memory at its first backward has left by then, beside forwards; and what exceeds
    it at the last backward during which it holds as much comes back after that. Units move as a whole, or `by_layer`.
    """
    end = step_end(setup, machine, 0)
    after_pipeline = end.reduce + end.update + end.gather + machine.host.step
    chunks = _chunks_of_first_rank(setup, machine)
    compute = setup.num_microbatches * sum(sum(chunk.forward) + sum(chunk.backward) for chunk in chunks)
    compute -= most_hidden(setup, machine)[0]
    excess = least_bytes(setup, len(setup.segments)) - budget.device
    if excess <= 0:
        return compute + after_pipeline

    leaves = excess
    first_copy = chunks[0].forward[0]
    back_at_work = chunks[-1].backward[-1]  # that backward itself, of the last chunk and the last segment
    if by_layer:
        # Copies begin when the first layer has run, one more layer than memory counts may still be leaving, and the
        # unit of the backward comes back within it.
        leaves = max(0.0, excess - _largest_layer(setup))
        first_copy = 0.0
        back_at_work = 0.0
    forwards_before = sum(_of_first_units(chunk.forward, chunk.held) for chunk in chunks)
    wait_before = max(0.0, first_copy + leaves / budget.bandwidth - forwards_before)
    compute_after = _compute_from_last_full(setup, chunks) - back_at_work
    wait_after = max(0.0, excess / budget.bandwidth - compute_after)
    return wait_before + compute + wait_after + after_pipeline


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


def _compute_from_last_full(setup: TrainingSetup, chunks: list[_Chunk]) -> float:
    """The compute of the first rank from the last backward on during which it holds as much as during the first. The
    backwards before it are of whole micro-batches, of all chunks."""
    number = backwards_like_the_first(setup.shape, setup.has_pairs)[-1]
    units_before = number // len(chunks)
    num_units = setup.shape.num_units
    seconds = 0.0
    for chunk in chunks:
        seconds += _of_first_units(chunk.forward, num_units) - _of_first_units(chunk.forward, units_before + chunk.held)
        seconds += _of_first_units(chunk.backward, num_units - units_before)
    return seconds


def _of_first_units(seconds: Row, number: int) -> float:
    """The time of the first units of a step, from that of the segments of a micro-batch."""
    microbatches, segments = divmod(number, len(seconds))
    return microbatches * sum(seconds) + sum(seconds[:segments])
