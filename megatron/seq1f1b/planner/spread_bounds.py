"""Lower bounds of the seconds of a step before its layers are spread over stages, or before its sequences are cut.

Tested in planner/test_search.py.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from math import inf
from typing import NamedTuple

from ..costs.machine import Machine
from ..costs.pair_times import exchange_row
from ..costs.stage_times import first_passes, step_end, sums_of_stage
from ..costs.training_setup import Fsdp, StageLayers, TrainingSetup, splits_backward
from ..schedule import Placement, Shape
from .bounds import least_compute_of_ranks, of_any_cut
from .memory_bounds import on_one_rank
from .pair_bounds import units_alone
from .space import Question, evenly_cut, may_hide, ways_to_shard, ways_to_take_the_loss


def least_seconds_of(sizes: TrainingSetup, machine: Machine, segments: int, splits: bool) -> float:
    """A lower bound for all spreads of layers and cuts, and all schedules that split backwards, or that do not; inf
    where there is no even cut. The mean rank waits for half of the other ranks, which run a layer at least of the first
    unit before it and of the last one after it, and so does the busiest rank, which has whole layers. Schedules that
    split backwards fill the time after it."""
    return _least_pipeline(sizes, machine, segments, splits) + _least_end(sizes, machine)


def _least_pipeline(sizes: TrainingSetup, machine: Machine, segments: int, splits: bool) -> float:
    """The same without what follows the pipeline."""
    passing = _least_passing(sizes.layer_setup, machine, segments, splits)
    of_mean = _mean_seconds(sizes, machine, segments) + (sizes.pipeline_parallel - 1) / 2 * passing
    return max(of_mean, _least_of_busiest(sizes, machine, segments, passing))


def least_seconds_in_chunks(
    sizes: TrainingSetup,
    machine: Machine,
    segments: int,
    splits: bool,
    spreads: Iterable[tuple[int, ...]],
) -> float:
    """As `least_seconds_of`, if stages have the layers of one of some spreads. The mean rank and each single one wait
    for the layers before them."""
    return min(_least_of_spread(sizes, machine, segments, splits, layers) for layers in spreads)


def _least_of_spread(
    sizes: TrainingSetup, machine: Machine, segments: int, splits: bool, layers: tuple[int, ...]
) -> float:
    evenly = evenly_cut(sizes.layer_setup, segments)
    if evenly is None:
        return inf
    ranks = sizes.pipeline_parallel
    placement = Placement(ranks, len(layers) // ranks)
    of_ranks = least_compute_of_ranks(evenly.layer_setup, of_any_cut(machine, segments), placement, layers)
    seconds = [sizes.num_microbatches * compute.work for compute in of_ranks]
    if sizes.hides_experts:
        exchanged = _most_exchanged(sizes.layer_setup, machine, segments)
        shape = Shape(placement, sizes.num_microbatches, segments)
        for rank, in_pairs in enumerate(_layers_in_pairs(shape, layers)):
            seconds[rank] -= exchanged * in_pairs
    longest = 0.0
    wait = waits = 0.0
    for of_rank, compute in zip(seconds, of_ranks, strict=True):
        longest = max(longest, wait + of_rank)
        waits += wait
        wait += _passing(compute.first_forward, compute.first_backward, splits)
    of_mean = max(_mean_seconds(sizes, machine, segments), sum(seconds) / ranks) + waits / ranks
    return max(of_mean, longest) + _least_end(sizes, machine)


@lru_cache(maxsize=1 << 14)
def _layers_in_pairs(shape: Shape, layers: tuple[int, ...]) -> list[int]:
    """For each rank the layers of all micro-batches but those that run alone there, however they are cut."""
    found = []
    for rank, alone in enumerate(units_alone(shape)):
        in_pairs = 0
        for stage, units in zip(shape.placement.stages_of(rank), alone, strict=True):
            in_pairs += layers[stage] * (shape.num_microbatches - units // shape.num_segments)
        found.append(in_pairs)
    return found


def _passing(forward: float, backward: float, splits: bool) -> float:
    """Seconds in which the first unit, and the last one back, pass a stage. A schedule that splits backwards fills the
    time of the latter."""
    return forward if splits else forward + backward


@lru_cache(maxsize=1 << 16)
def _least_passing(layer_setup: TrainingSetup, machine: Machine, segments: int, splits: bool) -> float:
    """Seconds at least in which the first unit, and the last one back, pass a layer."""
    evenly = evenly_cut(layer_setup, segments)
    if evenly is None:
        return 0.0
    passing = []
    for layer, _ in evenly.stages[0].layers:
        first = first_passes(evenly, of_any_cut(machine, segments), StageLayers.of_layer(layer))
        passing.append(_passing(first.forward, first.backward, splits))
    return min(passing)


def _least_of_busiest(sizes: TrainingSetup, machine: Machine, segments: int, passing: float) -> float:
    """Seconds at least of one of the ranks, which have whole layers, embedding and loss. A rank waits for those before
    it, the time of `passing` for each."""
    exchanged = _most_exchanged(sizes.layer_setup, machine, segments) if sizes.hides_experts else 0.0
    last = sizes.pipeline_parallel - 1
    longest = 0.0
    for least in _least_loads(sizes.layer_setup, machine, segments):
        layer = sizes.num_microbatches * max(0.0, least.layer - exchanged)
        ends = [rank * passing for rank in range(last + 1)]
        ends[0] += sizes.num_microbatches * least.embedding
        ends[last] += sizes.num_microbatches * least.head
        with_another = [end + layer for end in ends]  # the least first, which takes the next layer
        heapify(with_another)
        for _ in range(least.num_layers - 1):
            heapreplace(with_another, with_another[0] + layer)
        longest = max(longest, with_another[0], *ends)
    return longest


class _LeastLoads(NamedTuple):
    """Seconds of a micro-batch at least, however it is cut: of each of `num_layers` layers, of the embedding and of the
    loss."""

    num_layers: int
    layer: float
    embedding: float
    head: float


class _Pass(NamedTuple):
    """Seconds at least of a forward or a backward: in which its device computes, and in which its host launches."""

    device: float
    host: float


@lru_cache(maxsize=1 << 16)
def _least_loads(layer_setup: TrainingSetup, machine: Machine, segments: int) -> list[_LeastLoads]:
    """Loads that add up to what a rank takes at least, for all layers that take as long as those of a kind, or longer.
    A rank takes at least as long as its device computes, and as its host launches, forward and backward. Sums of one of
    both are bounds: here of the device, and, for each direction, of the one that takes a single layer longer."""
    evenly = evenly_cut(layer_setup, segments)
    if evenly is None:
        return []
    of_any = of_any_cut(machine, segments)
    actions = segments * machine.host.action  # a part of all sums, however many layers there are

    def passes(stage: StageLayers) -> list[_Pass]:
        """Forward and backward."""
        sums = sums_of_stage(evenly, of_any, stage)
        return [_Pass(work.compute - actions, work.launches - actions) for work in sums]

    embedding = passes(StageLayers((), is_first=True, is_last=False))
    head = passes(StageLayers((), is_first=False, is_last=True))
    of_kinds = [(count, passes(StageLayers.of_layer(layer))) for layer, count in evenly.stages[0].layers]
    loads = []
    for _, of_layer in of_kinds:
        of_device = (False, False)
        of_longer = tuple(of_pass.host > of_pass.device for of_pass in of_layer)
        for are_of_host in {of_device, of_longer}:
            layer = _load(of_layer, are_of_host)
            num_layers = sum(count for count, other in of_kinds if _load(other, are_of_host) >= layer)
            loads.append(_LeastLoads(num_layers, layer, _load(embedding, are_of_host), _load(head, are_of_host)))
    return loads


def _load(passes: Sequence[_Pass], are_of_host: Sequence[bool]) -> float:
    """The seconds of a forward and a backward, each of its host or of its device."""
    seconds = 0.0
    for of_pass, is_of_host in zip(passes, are_of_host, strict=True):
        seconds += of_pass.host if is_of_host else of_pass.device
    return seconds


def least_seconds_of_any(sizes: TrainingSetup, question: Question, segments: int) -> float:
    """A lower bound for all spreads of layers, cuts, recomputations, losses and schedules, and for more segments, too:
    none takes less than no recomputation, with logits kept if they may be. Segments may be so many that no rank
    waits."""
    least = sizes.without_recomputation().but(
        hides_experts=may_hide(question, sizes, segments, "none"),
        replays_layers=question.by_megatron,
        keeps_logits=ways_to_take_the_loss(sizes)[-1],
    )
    may_shard = Fsdp.GRADIENTS in ways_to_shard(question, sizes)
    end = _least_end(sizes.but(fsdp=Fsdp.GRADIENTS) if may_shard else sizes, question.machine)
    if segments > 1:
        return _mean_seconds(least, question.machine, segments) + end
    splits = any(map(splits_backward, question.families))
    return _least_pipeline(least, question.machine, segments, splits) + end


def _mean_seconds(sizes: TrainingSetup, machine: Machine, segments: int) -> float:
    """The compute of the mean rank in an even cut; inf where there is no such cut."""
    work = _least_work(sizes.layer_setup, machine, segments)
    if sizes.hides_experts:
        # All forwards of the first micro-batch come before the first backward.
        paired = 1 - 1 / sizes.num_microbatches
        work -= paired * _most_hidden(sizes.layer_setup, machine, segments)
    return sizes.num_microbatches * work / sizes.pipeline_parallel


def _least_end(sizes: TrainingSetup, machine: Machine) -> float:
    """Seconds at least from the last sum of gradients on: the slowest rank updates as many parameters as the mean rank,
    or more, and the host does something once in a step."""
    return _whole_update(sizes.state_setup, machine) / sizes.pipeline_parallel + machine.host.step


@lru_cache(maxsize=1 << 14)
def _whole_update(sizes: TrainingSetup, machine: Machine) -> float:
    """Seconds in which the optimizer updates the whole model on one pipeline rank."""
    return step_end(on_one_rank(sizes), machine, 0).update


@lru_cache(maxsize=1 << 16)
def _least_work(layer_setup: TrainingSetup, machine: Machine, segments: int) -> float:
    """Seconds of a micro-batch on all stages, if it is cut evenly; inf where it cannot be."""
    evenly = evenly_cut(layer_setup, segments)
    if evenly is None:
        return inf
    return sum(map(max, sums_of_stage(evenly, of_any_cut(machine, segments), evenly.stages[0])))


@lru_cache(maxsize=1 << 16)
def _most_exchanged(layer_setup: TrainingSetup, machine: Machine, segments: int) -> float:
    """Seconds of the exchange of experts of a micro-batch on a layer: no pair hides more of it."""
    evenly = evenly_cut(layer_setup, segments)
    if evenly is None:
        return 0.0
    most = 0.0
    for layer, _ in evenly.stages[0].layers:
        row = exchange_row(evenly, machine, StageLayers.of_layer(layer))
        most = max(most, sum(row.exchange_f) + sum(row.exchange_b))
    return most


@lru_cache(maxsize=1 << 16)
def _most_hidden(layer_setup: TrainingSetup, machine: Machine, segments: int) -> float:
    """The most seconds of a micro-batch that pairs hide, if all of its units are in pairs."""
    evenly = evenly_cut(layer_setup, segments)
    if evenly is None:
        return 0.0
    row = exchange_row(evenly, machine, evenly.stages[0])
    return min(sum(row.exchange_f), sum(row.compute_b)) + min(sum(row.exchange_b), sum(row.compute_f))
