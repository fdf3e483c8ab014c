"""Lower bounds of the bytes of a step, and of the seconds in which copies to the host make room for it.

Tested in planner/test_search.py.
"""

from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from ..costs.blocks import BYTES
from ..costs.layer_bytes import unit_bytes
from ..costs.step_memory import static_memory
from ..costs.training_setup import StageLayers, TrainingSetup
from ..schedule import Placement, Shape
from .first_backward import backwards_like_the_first, of_first_units, units_at_first_backward
from .space import MemoryBudget, Question, evenly_cut, may_move

# Families that run all forwards before the first backward.
_FORWARDS_FIRST = ("breadth-first", "gpipe")


def on_one_rank(sizes: TrainingSetup) -> TrainingSetup:
    """The same parallel sizes with all layers on one pipeline rank."""
    return sizes.but(placement=Placement(1), layers_per_stage=(sizes.model.num_layers,))


def may_fit(sizes: TrainingSetup, question: Question, segments: int, splits: bool) -> bool:
    """Whether the mean rank has room for its share of the model's state and, with its host, for its share of what one
    micro-batch keeps. All forwards of the first micro-batch come before its first backward, so each rank has all of
    this at once, however layers are spread. Nothing moves to the host where backwards are split. A search partitions
    the state under `breadth-first` alone, which runs all forwards before the first backward, and moves nothing
    either."""
    device, host, _ = question.budget
    alone = sizes.alone
    kept = sum(_kept(alone, alone.stages[0], segments)) / sizes.pipeline_parallel
    state = _mean_state(sizes)
    if state <= device and state + kept <= device + (0.0 if splits else host):
        return True
    if splits or question.partitions_state is not None or sizes.pipeline_parallel == 1:
        return False
    return _mean_state(sizes.but(partitions_state=True)) + sizes.num_microbatches * kept <= device


def _mean_state(sizes: TrainingSetup) -> float:
    """The bytes of the model's state on the mean rank."""
    return _whole_state(sizes.with_its_state) / sizes.pipeline_parallel


@lru_cache(maxsize=1 << 14)
def _whole_state(sizes: TrainingSetup) -> float:
    """The bytes of the model's state on all pipeline ranks."""
    return float(sum(static_memory(on_one_rank(sizes), 0)))


def least_bytes(setup: TrainingSetup, segments: float = inf) -> float:
    """A lower bound on the fullest rank, on its device and host together: its state, and on the first rank what it
    holds beside that at a first backward, with as many segments, or however many there are if that is inf."""
    parts = _least_parts_of(setup, segments)
    return max(parts.first + _held_at_once(setup, parts, segments), parts.fullest)


class _LeastParts(NamedTuple):
    """Bytes: the state of the first rank, that of the fullest, and for each chunk of the first rank what the units of a
    micro-batch keep (`of_chunks`), and the number of its parameters."""

    first: float
    fullest: float
    of_chunks: tuple[tuple[float, ...], ...]
    parameters: tuple[float, ...]

    @property
    def microbatch(self) -> float:
        """What a micro-batch keeps on all chunks of the first rank."""
        return sum(map(sum, self.of_chunks))


def _least_parts_of(setup: TrainingSetup, segments: float) -> _LeastParts:
    # Whole states are all alike.
    return _least_parts(setup if setup.partitions_state else setup.but(family="1f1b"), segments)


@lru_cache(maxsize=1 << 16)
def _least_parts(setup: TrainingSetup, segments: float) -> _LeastParts:
    first, fullest, parameters = _states(setup.with_its_state)
    stages = setup.stages
    of_first = [stages[stage] for stage in setup.placement.stages_of(0)]
    return _LeastParts(first, fullest, tuple(_kept(setup.alone, stage, segments) for stage in of_first), parameters)


@lru_cache(maxsize=1 << 14)
def _states(setup: TrainingSetup) -> tuple[float, float, tuple[float, ...]]:
    """The state of the first rank, that of the fullest, and the parameters of the first rank's chunks, which set-ups
    share that differ in their activations."""
    stages = setup.stages
    of_ranks = [
        tuple(stages[stage] for stage in setup.placement.stages_of(rank)) for rank in range(setup.pipeline_parallel)
    ]
    alike = {stages: rank for rank, stages in enumerate(of_ranks)}  # ranks with the same stages have the same state
    states = {stages: sum(static_memory(setup, rank)) for stages, rank in alike.items()}
    parameters = tuple(sum(setup.parameters[stage]) for stage in setup.placement.stages_of(0))
    return states[of_ranks[0]], max(states.values()), parameters


@lru_cache(maxsize=1 << 16)
def _kept(alone: TrainingSetup, stage: StageLayers, segments: float) -> tuple[float, ...]:
    """What the units of a micro-batch keep on a stage in an even cut: its first units have no fewer tokens in any other
    cut. If `segments` is inf it is not cut; 0 where it cannot be."""
    stays = alone.but(offloads=0.0)
    if segments == inf:
        return (float(unit_bytes(stays.but(segments=()), stage).sum()),)
    evenly = evenly_cut(stays, int(segments))
    if evenly is None:
        return (0.0,) * int(segments)
    return tuple(unit_bytes(evenly, stage).sum(axis=1).tolist())


def _held_at_once(setup: TrainingSetup, parts: _LeastParts, segments: float) -> float:
    """The least bytes on the first rank at its first backward, or where it has to gather chunks, at the first one of
    any chunk."""
    if segments == inf:
        return _microbatches_at_once(setup, inf) * parts.microbatch
    numbers = units_at_first_backward(setup.family, _shape_of(setup, int(segments)), setup.has_pairs)
    of_chunks = [of_first_units(kept, number) for kept, number in zip(parts.of_chunks, numbers, strict=True)]
    if not (setup.moves_state and setup.family in _FORWARDS_FIRST):
        return sum(of_chunks)
    whole = _whole_chunks(parts.parameters, setup.gradient_bytes)
    return max(sum(of_chunks[: chunk + 1]) + bytes_of_whole for chunk, bytes_of_whole in enumerate(whole))


def _whole_chunks(parameters: tuple[float, ...], gradient_bytes: int) -> list[float]:
    """Bytes of whole weights and gradients beside the shares of a partitioned state, at the first backward of each
    chunk. The last chunk goes first. Chunks have their weights at work and one before that; their gradients at work
    and until the next one ends (`partition_state`)."""
    of_weights = [sum(parameters[max(0, chunk - 1) : chunk + 1]) for chunk in range(len(parameters))]
    of_gradients = [sum(parameters[chunk : chunk + 2]) for chunk in range(len(parameters))]
    return [
        BYTES * weights + gradient_bytes * gradients
        for weights, gradients in zip(of_weights, of_gradients, strict=True)
    ]


def _shape_of(setup: TrainingSetup, segments: int) -> Shape:
    """The shape of the set-up once it is cut."""
    return Shape(setup.placement, setup.num_microbatches, segments)


def _microbatches_at_once(setup: TrainingSetup, segments: float) -> float:
    """The least number of micro-batches that the first rank holds after the last forward of each."""
    if setup.family in _FORWARDS_FIRST:
        return setup.num_microbatches
    return min(setup.num_microbatches, 1 + (setup.pipeline_parallel - 1) / (segments * setup.placement.num_chunks))


def least_seconds_away(setup: TrainingSetup, budget: MemoryBudget, segments: int) -> float:
    """A lower bound from the time to copy what exceeds the memory of the first rank to its host and back; inf if both
    memories together are too small, or if a search moves nothing of this schedule. At the first backward the excess has
    left, and has to come back; later backwards have as large an excess of other units. There is an excess after the
    last forward of each micro-batch, too, and a byte may stay on the host for as many of these moments as micro-batches
    are held at once."""
    over = least_bytes(setup, segments) - budget.device
    if over <= 0:
        return 0.0
    parts = _least_parts_of(setup, segments)
    if not may_move(setup) or parts.fullest > budget.device or over > budget.host:
        return inf
    at_once = _microbatches_at_once(setup, segments)
    over_always = parts.first + at_once * parts.microbatch - budget.device
    times = max(2, len(backwards_like_the_first(_shape_of(setup, segments), setup.has_pairs)))
    return max(times * over, setup.num_microbatches / ceil(at_once) * over_always) / budget.bandwidth
