"""Lower bounds of the bytes of a step, and of the seconds in which copies to the host make room for it.

Tested in planner/test_search.py.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from math import ceil, inf
from typing import NamedTuple

from ..costs.blocks import BYTES
from ..costs.layer_bytes import Use, layer_keys_values_gradients, loss_bytes, running_bytes, unit_bytes
from ..costs.step_memory import HELD_BACK, HELD_BACK_OF_LOGITS, static_memory
from ..costs.training_setup import Fsdp, StageLayers, TrainingSetup
from ..schedule import Kind, Placement, Shape
from .first_backward import backwards_like_the_first, of_first_units, units_at_first_backward
from .space import (
    MemoryBudget,
    Question,
    evenly_cut,
    may_be_partitioned,
    may_move,
    must_be_partitioned,
    numbers_of_chunks,
    ways_to_shard,
)

# Families that run all forwards before the first backward.
_FORWARDS_FIRST = ("breadth-first", "gpipe")


def on_one_rank(sizes: TrainingSetup) -> TrainingSetup:
    """The same parallel sizes with all layers on one pipeline rank."""
    return sizes.but(placement=Placement(1), layers_per_stage=(sizes.model.num_layers,))


def with_room_for_state(question: Question, sizes: TrainingSetup) -> TrainingSetup | None:
    """The sizes, if the mean rank has room for its share of the model's state, however layers are spread; with a
    partitioned state if it has room for that alone; None if it has none."""
    device = question.budget.device
    ways = reversed(ways_to_shard(question, sizes))  # the least bytes first
    if any(_mean_state(sizes.but(fsdp=fsdp)) <= device for fsdp in ways):
        return sizes
    if may_be_partitioned(question, sizes):
        shares = sizes.but(partitions_state=True)
        most_chunks = max(numbers_of_chunks(question, shares))
        if _mean_state(shares) + _mean_whole_chunks(sizes, most_chunks) <= device:
            return shares
    return None


class SizesMemory:
    """The memory of set-ups of some parallel sizes, in so many segments. They differ in what they compute again, hide
    and shard, and share the bytes of what is alike in them."""

    def __init__(self, question: Question, sizes: TrainingSetup, segments: int) -> None:
        self._question = question
        self._activation_setup = sizes.activation_setup
        self._segments = segments
        self._state_of: dict[tuple[Fsdp, bool], float] = {}
        self._may_be_partitioned = may_be_partitioned(question, sizes)

    def may_fit(self, setup: TrainingSetup, splits: bool) -> bool:
        """Whether the mean rank has room for its share of the model's state and, with its host, for its share of what
        one micro-batch keeps. All forwards of the first micro-batch come before its first backward, so each rank has
        all of this at once, however layers are spread. Nothing moves to the host where backwards are split. A search
        partitions the state under `breadth-first` alone, which runs all forwards before the first backward, and moves
        nothing either."""
        device, host, _ = self._question.budget
        if not must_be_partitioned(self._question, setup):
            state = self._state(setup, setup.partitions_state)
            room = _room(setup, state, device)
            most = room + (0.0 if splits else host)
            # No set-up keeps more than the one that computes nothing again, and mostly there is room for that.
            if room >= 0 and (self._kept(setup, "none") <= most or self._kept(setup, setup.recompute) <= most):
                return True
        if splits or setup.hides_experts or not self._may_be_partitioned:
            return False
        return self._state(setup, True) + setup.num_microbatches * self._kept(setup, setup.recompute) <= device

    def _kept(self, setup: TrainingSetup, recompute: str) -> float:
        """The bytes that a micro-batch of the set-up keeps on the mean rank, if so much is computed again."""
        share = 1.0 if recompute == "none" else setup.recomputed_share
        of_all = _kept_of_all(self._activation_setup, recompute, share, setup.keeps_logits, self._segments)
        return of_all / setup.pipeline_parallel

    def _state(self, setup: TrainingSetup, partitions_state: bool) -> float:
        """The bytes of the model's state on the mean rank."""
        alike = (setup.fsdp, partitions_state)
        if alike not in self._state_of:
            self._state_of[alike] = _mean_state(setup.but(partitions_state=partitions_state))
        return self._state_of[alike]


def _mean_state(sizes: TrainingSetup) -> float:
    """The bytes of the model's state on the mean rank."""
    return _whole_state(sizes.state_setup) / sizes.pipeline_parallel


@lru_cache(maxsize=1 << 14)
def _whole_state(sizes: TrainingSetup) -> float:
    """The bytes of the model's state on all pipeline ranks."""
    return float(sum(static_memory(on_one_rank(sizes), 0)))


def _mean_whole_chunks(sizes: TrainingSetup, most_chunks: int) -> float:
    """The bytes of whole weights and gradients that the mean rank has at least, at the backward of the chunk at which
    it has the most, M. At the backward of chunk k these are the weights of k - 1 and k, and the gradients of k and
    k + 1 (`_whole_chunks`). Over the C chunks of a rank, with S bytes in all, that adds up to 2 * S less the weights of
    the last chunk and the gradients of the first. As each of these two chunks is whole at its own backward, they come
    to M at most. So C * M >= 2 * S - M."""
    parameters = sum(map(sum, on_one_rank(sizes.state_setup).parameters)) / sizes.pipeline_parallel
    return 2 * (BYTES + sizes.gradient_bytes) * parameters / (most_chunks + 1)


@lru_cache(maxsize=1 << 16)
def _kept_of_all(
    activation_setup: TrainingSetup, recompute: str, recomputed_share: float, keeps_logits: bool, segments: int
) -> float:
    """The bytes that a micro-batch keeps on all ranks, if so much is computed again."""
    setup = activation_setup.but(recompute=recompute, recomputed_share=recomputed_share, keeps_logits=keeps_logits)
    return sum(_kept(setup, setup.stages[0], segments))


def least_bytes(setup: TrainingSetup, segments: float = inf) -> float:
    """A lower bound on the fullest rank, on its device and host together: its state, and what it holds beside that at
    its first backward, with as many segments, or however many there are if that is inf."""
    return max(_least_bytes_of_first(setup, segments), _least_bytes_of_others(setup, segments))


def _least_bytes_of_first(setup: TrainingSetup, segments: float) -> float:
    """The same on the first rank, which may have to gather chunks beside that."""
    return _least_parts_of(setup, segments).ranks[0].stays + _held_of_first(setup, segments)


def _held_of_first(setup: TrainingSetup, segments: float) -> float:
    """What the first rank holds beside its state."""
    parts = _least_parts_of(setup, segments)
    if segments < inf and setup.moves_state and setup.family in _FORWARDS_FIRST:
        return _held_with_whole_chunks(setup, parts, int(segments))
    return _held_by(setup, parts.ranks[0], segments)


def _least_bytes_of_others(setup: TrainingSetup, segments: float) -> float:
    """The same on the other ranks; 0 if all have the stages of the first one."""
    others = _least_parts_of(setup, segments).ranks[1:]
    return max((rank.stays + _held_by(setup, rank, segments) for rank in others), default=0.0)


@lru_cache(maxsize=1024)  # several bounds ask that right after each other
def excess_of_first(setup: TrainingSetup, segments: int, device: float) -> float:
    """The least bytes of units, and of what is at work beside them, that the first rank holds at its first backward
    beyond what its device has room for, if nothing moves; negative if there is room."""
    return _held_of_first(setup, segments) - _room(setup, _least_parts_of(setup, segments).ranks[0].stays, device)


@lru_cache(maxsize=1024)
def excess_of_others(setup: TrainingSetup, segments: int, device: float) -> Mapping[int, float]:
    """The same on the other ranks, by their numbers; only of the first of those that have the same stages."""
    others = _least_parts_of(setup, segments).ranks[1:]
    return {rank.number: _held_by(setup, rank, segments) - _room(setup, rank.stays, device) for rank in others}


def _room(setup: TrainingSetup, stays: float, device: float) -> float:
    """The bytes that a device has beside what stays there: the allocator holds back a part of what comes and goes. Of
    whole chunks of a partitioned state it does not."""
    return (device - stays) / (1 if setup.moves_state else 1 + HELD_BACK)


def least_on_device(setup: TrainingSetup, segments: int, by_layer: bool) -> float:
    """A lower bound on the device of the fullest rank, whatever moves to its host: units as a whole, or `by_layer`."""
    activation_setup = setup.activation_setup
    with_held_back = 1 if setup.moves_state else 1 + HELD_BACK
    of_ranks = []
    for rank in _states(setup.state_setup).ranks:
        at_work = max(_at_work(activation_setup, stage, segments, by_layer) for stage in set(rank.stages))
        of_ranks.append(rank.state + with_held_back * at_work)
    return max(of_ranks)


class _RankState(NamedTuple):
    """The number of a rank, its stages, and the bytes of its state."""

    number: int
    stages: tuple[StageLayers, ...]
    state: float


class _States(NamedTuple):
    """The first of the ranks that have the same stages, in their order, and the numbers of parameters of the chunks of
    the first rank."""

    ranks: tuple[_RankState, ...]
    parameters: tuple[float, ...]


class _RankParts(NamedTuple):
    """The number of a rank, and bytes: what stays on its device, which is its state and what the allocator holds back
    of logits, what its first backward has at work, 0 if that is not known, and what the units of a micro-batch keep on
    each of its chunks."""

    number: int
    stays: float
    at_work: float
    of_chunks: tuple[tuple[float, ...], ...]

    @property
    def microbatch(self) -> float:
        """What a micro-batch keeps on all chunks of the rank."""
        return sum(map(sum, self.of_chunks))


class _LeastParts(NamedTuple):
    """The same ranks and numbers as in `_States`, with what units keep."""

    ranks: tuple[_RankParts, ...]
    parameters: tuple[float, ...]


def _least_parts_of(setup: TrainingSetup, segments: float) -> _LeastParts:
    return _least_parts(setup.state_setup, setup.activation_setup, segments)


@lru_cache(maxsize=1 << 16)
def _least_parts(state_setup: TrainingSetup, activation_setup: TrainingSetup, segments: float) -> _LeastParts:
    states = _states(state_setup)
    stages = set(chain.from_iterable(rank.stages for rank in states.ranks))
    kept = {stage: _kept(activation_setup, stage, segments) for stage in stages}
    ranks = []
    for number, of_rank, state in states.ranks:
        last = of_rank[-1]
        stays = state + _held_back_of_logits(activation_setup, last, segments)
        at_work = _at_first_backward(activation_setup, last) if segments == 1 else 0.0
        ranks.append(_RankParts(number, stays, at_work, tuple(kept[stage] for stage in of_rank)))
    return _LeastParts(tuple(ranks), states.parameters)


@lru_cache(maxsize=1 << 14)
def _states(setup: TrainingSetup) -> _States:
    """The states of ranks, which set-ups share that differ in their activations."""
    stages = setup.stages
    ranks: dict[tuple[StageLayers, ...], _RankState] = {}
    for rank in range(setup.pipeline_parallel):
        of_rank = tuple(stages[stage] for stage in setup.placement.stages_of(rank))
        if of_rank not in ranks:
            ranks[of_rank] = _RankState(rank, of_rank, sum(static_memory(setup, rank)))
    parameters = tuple(sum(setup.parameters[stage]) for stage in setup.placement.stages_of(0))
    return _States(tuple(ranks.values()), parameters)


@lru_cache(maxsize=1 << 16)
def _kept(activation_setup: TrainingSetup, stage: StageLayers, segments: float) -> tuple[float, ...]:
    """What the units of a micro-batch keep on a stage in an even cut: its first units have no fewer tokens in any other
    cut. If `segments` is inf it is not cut; 0 where it cannot be."""
    if segments == inf:
        return (float(unit_bytes(activation_setup.but(segments=()), stage).sum()),)
    evenly = evenly_cut(activation_setup, int(segments))
    if evenly is None:
        return (0.0,) * int(segments)
    return tuple(unit_bytes(evenly, stage).sum(axis=1).tolist())


@lru_cache(maxsize=1 << 16)
def _at_first_backward(activation_setup: TrainingSetup, last: StageLayers) -> float:
    """What is at work beside the units that a rank holds at its first backward, which is that of a whole sequence on
    its `last` stage. With the loss, it is what the first forward there has at work, right before that backward."""
    kind = Kind.F if last.is_last else Kind.B
    return sum(running_bytes(activation_setup.but(segments=()), last, kind, 0, activation_setup.sequence_length))


@lru_cache(maxsize=1 << 16)
def _held_back_of_logits(activation_setup: TrainingSetup, last: StageLayers, segments: float) -> float:
    """What the allocator holds back at least of the logits of a rank with this `last` stage."""
    if not last.is_last or segments == inf:
        return 0.0
    evenly = evenly_cut(activation_setup, int(segments))
    return 0.0 if evenly is None else HELD_BACK_OF_LOGITS * loss_bytes(evenly, max(evenly.segments))


@lru_cache(maxsize=1 << 16)
def _at_work(activation_setup: TrainingSetup, stage: StageLayers, segments: int, by_layer: bool) -> float:
    """What a device has at least while backwards of a stage run: the gradients of the keys and values of all earlier
    segments, and either these keys and values, when the last segment is through, or what the first segment computes
    with, and keeps: the whole unit, or its keys and values, if units move `by_layer`. As in `_kept` an even cut has the
    fewest bytes."""
    evenly = evenly_cut(activation_setup, segments)
    if evenly is None:
        return 0.0
    gradients = sum(count * layer_keys_values_gradients(evenly, layer) for layer, count in stage.layers)
    kept = unit_bytes(evenly, stage)
    earlier = kept[:-1, Use.KEYS_VALUES]  # the last segment takes those of all to the host
    of_first = earlier[:1].sum() if by_layer else kept[0].sum()
    computing = sum(running_bytes(evenly, stage, Kind.B, *evenly.spans[0]))
    return float(gradients + max(earlier.sum(), of_first + computing))


def _held_by(setup: TrainingSetup, rank: _RankParts, segments: float) -> float:
    """The least bytes that a rank holds beside its state at its first backward: what units keep, and what it has at
    work."""
    if segments == inf:
        return _microbatches_at_once(setup, inf) * rank.microbatch
    shape = _shape_of(setup, int(segments))
    numbers = units_at_first_backward(setup.family, shape, setup.has_pairs, rank.number)
    kept = sum(of_first_units(kept, number) for kept, number in zip(rank.of_chunks, numbers, strict=True))
    return kept if setup.splits_backward else kept + rank.at_work


def _held_with_whole_chunks(setup: TrainingSetup, parts: _LeastParts, segments: int) -> float:
    """The least bytes on the first rank, which has to gather chunks, at the first backward of any chunk, if all
    forwards come before that."""
    units = setup.num_microbatches * segments
    of_chunks = [of_first_units(kept, units) for kept in parts.ranks[0].of_chunks]
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


def least_seconds_away(setup: TrainingSetup, budget: MemoryBudget, segments: int, by_layer: bool) -> float:
    """A lower bound from the time to copy what exceeds the memory of the first rank to its host and back; inf if the
    memories of a rank are too small, or if a search moves nothing of this schedule. Units may move as a whole, or
    `by_layer` as well. At the first backward the excess has left, and has to come back; later backwards have as large
    an excess of other units. There is an excess after the last forward of each micro-batch, too, and a byte may stay on
    the host for as many of these moments as micro-batches are held at once."""
    over_first = excess_of_first(setup, segments, budget.device)
    if over_first > 0 and not may_move(setup):
        return inf  # as most do; other ranks take longer to look at
    over = max([over_first, *excess_of_others(setup, segments, budget.device).values()])
    if over <= 0:
        return 0.0
    if not may_move(setup) or over > budget.host or least_on_device(setup, segments, by_layer) > budget.device:
        return inf
    first = _least_parts_of(setup, segments).ranks[0]
    at_once = _microbatches_at_once(setup, segments)
    over_always = at_once * first.microbatch - _room(setup, first.stays, budget.device)
    times = max(2, len(backwards_like_the_first(_shape_of(setup, segments), setup.has_pairs)))
    of_first = max(times * over_first, setup.num_microbatches / ceil(at_once) * over_always)
    return max(2 * over, of_first) / budget.bandwidth
