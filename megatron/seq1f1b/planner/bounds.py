"""Lower bounds of the seconds and the bytes of a step, by which a search leaves out what cannot be its answer.

Tested in planner/test_search.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from ..costs.layer_bytes import unit_bytes
from ..costs.machine import Machine, without_tiles
from ..costs.pair_times import pair_row, pair_times
from ..costs.rank_alone import seconds_alone
from ..costs.simulator import is_extended
from ..costs.stage_times import rows_of_stage, rows_of_stages, step_costs, step_end, sums_of_stage
from ..costs.step_memory import static_memory
from ..costs.training_setup import Fsdp, StageLayers, TrainingSetup, of_stages, splits_backward
from ..schedule import Placement, Shape
from .first_backward import backwards_like_the_first, units_at_first_backward
from .pair_bounds import most_hidden
from .rank_ends import CopyTimes, rank_ends
from .space import MemoryBudget, Question, lengths_of, may_hide, may_move, ways_to_take_the_loss


class _RankCompute(NamedTuple):
    """Seconds of compute on a rank: of a micro-batch, and of its first segment on the first of the rank's chunks."""

    work: float
    first_forward: float
    first_backward: float


def least_seconds(setup: TrainingSetup, machine: Machine) -> float:
    """A lower bound from the compute of each rank."""
    return _least_by_compute(setup, machine, _compute_of_ranks(setup, machine))


def _least_by_compute(setup: TrainingSetup, machine: Machine, of_ranks: Sequence[_RankCompute]) -> float:
    seconds = {
        rank: setup.num_microbatches * of_ranks[rank].work - hidden
        for rank, hidden in enumerate(most_hidden(setup, machine))
    }
    return _least_step(setup, machine, of_ranks, seconds)


def _compute_of_ranks(setup: TrainingSetup, machine: Machine) -> Sequence[_RankCompute]:
    return _compute_by_placement(setup.alone, machine, setup.placement, setup.layers_per_stage)


@lru_cache(maxsize=1 << 14)
def _compute_by_placement(
    alone: TrainingSetup, machine: Machine, placement: Placement, layers_per_stage: tuple[int, ...]
) -> Sequence[_RankCompute]:
    """The same; set-ups share it that differ in the number of micro-batches, or in their replicas."""
    rows = rows_of_stages(alone, machine, layers_per_stage)
    work_of: dict[int, float] = {}  # by the identity of rows, which equal stages share
    for of_stage in rows:
        if id(of_stage) not in work_of:
            work_of[id(of_stage)] = sum(map(sum, of_stage))
    found = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        f, i, w = rows[stages[0]]
        work = sum(work_of[id(rows[stage])] for stage in stages)
        found.append(_RankCompute(work, f[0], i[0] + w[0]))
    return found


@lru_cache(maxsize=1 << 14)
def _least_compute_by_placement(
    alone: TrainingSetup, machine: Machine, placement: Placement, layers_per_stage: tuple[int, ...]
) -> Sequence[_RankCompute]:
    """Seconds at least for every cut into as many segments, by an even one: no first segment is shorter there."""
    of_ranks = _compute_by_placement(alone, machine, placement, layers_per_stage)
    least = of_stages(alone.model, layers_per_stage, lambda stage: sum(map(max, sums_of_stage(alone, machine, stage))))
    works = [sum(least[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    return [compute._replace(work=work) for compute, work in zip(of_ranks, works, strict=True)]


def _least_step(
    setup: TrainingSetup, machine: Machine, of_ranks: Sequence[_RankCompute], seconds: Mapping[int, float]
) -> float:
    """A lower bound from the `seconds` that ranks take from first action to last. The ranks before a rank run
    its first unit before, and its last one after it. With weight gradients apart, those of a rank may fill the time
    after its last input gradient."""
    reduce, others = _ends(setup, machine)
    longest = 0.0
    before = 0.0
    after = 0.0
    for rank, compute in enumerate(of_ranks):
        if rank in seconds:
            longest = max(longest, before + seconds[rank] + max(reduce.get(rank, 0.0), after + reduce[0]))
        before += compute.first_forward
        after += 0.0 if setup.splits_backward else compute.first_backward
    return longest + others


def _ends(setup: TrainingSetup, machine: Machine) -> tuple[dict[int, float], float]:
    """Seconds of sums of gradients, by rank, and at least of all that follows. The end of the step looks alike on all
    ranks between the first and the last."""
    last = setup.pipeline_parallel - 1
    ends = {rank: step_end(setup, machine, rank) for rank in {0, min(1, last), last}}
    update = max(ends[0].update, ends[last].update)
    gather = max(ends[0].gather, ends[last].gather)
    return {rank: end.reduce for rank, end in ends.items()}, update + gather + machine.host.step


def least_seconds_of(sizes: TrainingSetup, machine: Machine, segments: int, splits: bool) -> float:
    """A lower bound for all spreads of layers and cuts, and all schedules that split backwards, or that do not; inf
    where there is no even cut. The mean rank waits for half of the other ranks, which run a layer at least of the first
    unit before it and of the last one after it. Schedules that split backwards fill the time after it."""
    return _least_pipeline(sizes, machine, segments, splits) + _least_end(sizes, machine)


def _least_pipeline(sizes: TrainingSetup, machine: Machine, segments: int, splits: bool) -> float:
    """The same without what follows the pipeline."""
    passing = _least_passing(sizes.alone, machine, segments, 1, splits)
    return _mean_seconds(sizes, machine, segments) + (sizes.pipeline_parallel - 1) / 2 * passing


def least_seconds_in_chunks(
    sizes: TrainingSetup,
    machine: Machine,
    segments: int,
    splits: bool,
    spreads: Iterable[tuple[int, ...]],
) -> float:
    """As `least_seconds_of`, if stages have the layers of one of some spreads. The mean rank and each single one wait
    for the layers before them; sharded gradients are summed beside layers, so there only the single layers of
    `least_seconds_of` count."""
    if sizes.shards_gradients:
        return least_seconds_of(sizes, machine, segments, splits)
    return min(_least_of_spread(sizes, machine, segments, splits, layers) for layers in spreads)


def _least_of_spread(
    sizes: TrainingSetup, machine: Machine, segments: int, splits: bool, layers: Sequence[int]
) -> float:
    alone = sizes.alone
    ranks = sizes.pipeline_parallel
    placement = Placement(ranks, len(layers) // ranks)
    waits = [0.0]
    for stage in range(ranks - 1):
        waits.append(waits[-1] + _least_passing(alone, machine, segments, layers[stage], splits))
    longest = 0.0
    for rank, wait in enumerate(waits):
        count = sum(layers[stage] for stage in placement.stages_of(rank))
        work = _least_of_layers(alone, machine, segments, count).work
        if sizes.hides_experts:
            work -= count * _most_exchanged(alone, machine, segments)
        longest = max(longest, wait + sizes.num_microbatches * work)
    of_mean = _mean_seconds(sizes, machine, segments) + sum(waits) / ranks
    return max(of_mean, longest) + _least_end(sizes, machine)


def _least_passing(alone: TrainingSetup, machine: Machine, segments: int, layers: int, splits: bool) -> float:
    """Seconds at least in which the first unit, and the last one back, pass a stage of so many layers. A schedule that
    splits backwards fills the time of the latter."""
    least = _least_of_layers(alone, machine, segments, layers)
    return least.first_forward if splits else least.first_forward + least.first_backward


def least_seconds_of_any(sizes: TrainingSetup, question: Question, segments: int) -> float:
    """A lower bound for all spreads of layers, cuts, recomputations, losses and schedules, and for more segments, too:
    none takes less than no recomputation, with logits kept if they may be. Segments may be so many that no rank
    waits."""
    least = sizes.without_recomputation().but(
        hides_experts=may_hide(question, sizes, segments, "none"),
        keeps_logits=ways_to_take_the_loss(sizes)[-1],
    )
    may_shard = question.by_megatron and sizes.data_group.size > 1
    end = _least_end(sizes.but(fsdp=Fsdp.GRADIENTS) if may_shard else sizes, question.machine)
    if segments > 1:
        return _mean_seconds(least, question.machine, segments) + end
    splits = any(map(splits_backward, question.families))
    return _least_pipeline(least, question.machine, segments, splits) + end


def _mean_seconds(sizes: TrainingSetup, machine: Machine, segments: int) -> float:
    """The compute of the mean rank in an even cut; inf where there is no such cut."""
    work = _least_work(sizes.alone, machine, segments)
    if sizes.hides_experts:
        # All forwards of the first micro-batch come before the first backward.
        paired = 1 - 1 / sizes.num_microbatches
        work -= paired * _most_hidden(sizes.alone, machine, segments)
    return sizes.num_microbatches * work / sizes.pipeline_parallel


def _least_end(sizes: TrainingSetup, machine: Machine) -> float:
    """Seconds at least from the last sum of gradients on: the slowest rank updates as many parameters as the mean rank,
    or more, and the host does something once in a step."""
    return _whole_update(sizes.with_its_state, machine) / sizes.pipeline_parallel + machine.host.step


@lru_cache(maxsize=1 << 14)
def _whole_update(sizes: TrainingSetup, machine: Machine) -> float:
    """Seconds in which the optimizer updates the whole model on one pipeline rank."""
    return step_end(_on_one_rank(sizes), machine, 0).update


def _on_one_rank(sizes: TrainingSetup) -> TrainingSetup:
    """The same parallel sizes with all layers on one pipeline rank."""
    return sizes.but(placement=Placement(1), layers_per_stage=(sizes.model.num_layers,))


@lru_cache(maxsize=1 << 16)
def _least_work(alone: TrainingSetup, machine: Machine, segments: int) -> float:
    """Seconds of a micro-batch on all stages, if it is cut evenly; inf where it cannot be."""
    evenly = _evenly_cut(alone, segments)
    if evenly is None:
        return inf
    return sum(map(max, sums_of_stage(evenly, _of_any_cut(machine, segments), evenly.stages[0])))


@lru_cache(maxsize=1 << 16)
def _least_of_layers(alone: TrainingSetup, machine: Machine, segments: int, count: int) -> _RankCompute:
    """Seconds at least on so many layers of a rank, however they are cut, and of whatever kind they are."""
    evenly = _evenly_cut(alone, segments)
    if evenly is None:
        return _RankCompute(0.0, 0.0, 0.0)
    of_any_cut = _of_any_cut(machine, segments)
    kinds = [layer for layer, _ in evenly.stages[0].layers]
    rows = []
    sums = []
    for layer in kinds:
        alike = StageLayers(((layer, count),), is_first=False, is_last=False)
        rows.append(rows_of_stage(evenly, of_any_cut, alike))
        sums.append(sums_of_stage(evenly, of_any_cut, alike))
    # Kinds may be mixed, so each sum is the least of all kinds.
    least = [[min(of_kinds) for of_kinds in zip(*passes, strict=True)] for passes in zip(*sums, strict=True)]
    return _RankCompute(
        work=sum(map(max, least)),
        first_forward=min(f[0] for f, _, _ in rows),
        first_backward=min(i[0] + w[0] for _, i, w in rows),
    )


@lru_cache(maxsize=1 << 16)
def _most_exchanged(alone: TrainingSetup, machine: Machine, segments: int) -> float:
    """Seconds of the exchange of experts of a micro-batch on a layer: no pair hides more of it."""
    evenly = _evenly_cut(alone, segments)
    if evenly is None:
        return 0.0
    most = 0.0
    for layer, _ in evenly.stages[0].layers:
        row = pair_row(evenly, machine, StageLayers(((layer, 1),), is_first=False, is_last=False))
        most = max(most, sum(row.exchange_f) + sum(row.exchange_b))
    return most


@lru_cache(maxsize=1 << 16)
def _most_hidden(alone: TrainingSetup, machine: Machine, segments: int) -> float:
    """The most seconds of a micro-batch that pairs hide, if all of its units are in pairs."""
    evenly = _evenly_cut(alone, segments)
    if evenly is None:
        return 0.0
    row = pair_row(evenly, machine, evenly.stages[0])
    return min(sum(row.exchange_f), sum(row.compute_b)) + min(sum(row.exchange_b), sum(row.compute_f))


def least_seconds_cut(setup: TrainingSetup, machine: Machine, segments: int) -> float:
    """A lower bound for all cuts into this number of segments."""
    evenly = _evenly_cut(setup, segments)
    if evenly is None:
        return 0.0
    of_any_cut = _of_any_cut(machine, segments)
    least = _least_compute_by_placement(evenly.alone, of_any_cut, evenly.placement, evenly.layers_per_stage)
    return _least_by_compute(evenly, of_any_cut, least)


def _of_any_cut(machine: Machine, segments: int) -> Machine:
    """The machine on which an even cut into `segments` takes least: the tiles of single lengths do not count."""
    return machine if segments == 1 else without_tiles(machine)


def _evenly_cut(setup: TrainingSetup, segments: int) -> TrainingSetup | None:
    lengths = lengths_of(setup, "even", segments)
    way = setup.cp_comm_type if segments == 1 else None
    return None if lengths is None else setup.but(segments=lengths, cp_comm_type=way)


def may_fit(sizes: TrainingSetup, question: Question, splits: bool) -> bool:
    """Whether the mean rank has room for its share of the model's state and, with its host, for its share of the
    activations of one micro-batch. All forwards of the first micro-batch come before its first backward, so each rank
    has all of these activations at once, however layers are spread. Nothing moves to the host where backwards are
    split. A search partitions the state under `breadth-first` alone, which runs all forwards before the first backward,
    and moves nothing either."""
    device, host, _ = question.budget
    activations = _activations(sizes.alone) / sizes.pipeline_parallel
    state = _mean_state(sizes)
    if state <= device and state + activations <= device + (0.0 if splits else host):
        return True
    if splits or question.partitions_state is not None or sizes.pipeline_parallel == 1:
        return False
    return _mean_state(sizes.but(partitions_state=True)) + sizes.num_microbatches * activations <= device


def _mean_state(sizes: TrainingSetup) -> float:
    """The bytes of the model's state on the mean rank."""
    return _whole_state(sizes.with_its_state) / sizes.pipeline_parallel


@lru_cache(maxsize=1 << 14)
def _whole_state(sizes: TrainingSetup) -> float:
    """The bytes of the model's state on all pipeline ranks."""
    return float(sum(static_memory(_on_one_rank(sizes), 0)))


@lru_cache(maxsize=1 << 14)
def _activations(alone: TrainingSetup) -> float:
    """The bytes of a micro-batch on all stages."""
    return float(unit_bytes(alone, alone.stages[0]).sum())


def least_bytes(setup: TrainingSetup, segments: float = inf) -> float:
    """A lower bound on the fullest rank, on its device and host together: its state, and on the first rank the
    activations that it holds at its first backward, with as many segments, or however many there are if that is
    inf."""
    parts = _least_parts_of(setup)
    return max(parts.first + _held_at_once(setup, parts, segments), parts.fullest)


class _LeastParts(NamedTuple):
    """Bytes: the state of the first rank, that of the fullest, and the activations of a micro-batch on each chunk of
    the first."""

    first: float
    fullest: float
    of_chunks: tuple[float, ...]


def _least_parts_of(setup: TrainingSetup) -> _LeastParts:
    return _least_parts(setup if setup.partitions_state else setup.but(family="1f1b"))  # whole states are all alike


@lru_cache(maxsize=1 << 16)
def _least_parts(setup: TrainingSetup) -> _LeastParts:
    first, fullest = _states(setup.with_its_state)
    stages = setup.stages
    of_first = [stages[stage] for stage in setup.placement.stages_of(0)]
    return _LeastParts(first, fullest, tuple(_held(setup.alone, stage) for stage in of_first))


@lru_cache(maxsize=1 << 14)
def _states(setup: TrainingSetup) -> tuple[float, float]:
    """The state of the first rank and that of the fullest, which set-ups share that differ in their activations."""
    stages = setup.stages
    of_ranks = [
        tuple(stages[stage] for stage in setup.placement.stages_of(rank)) for rank in range(setup.pipeline_parallel)
    ]
    alike = {stages: rank for rank, stages in enumerate(of_ranks)}  # ranks with the same stages have the same state
    states = {stages: sum(static_memory(setup, rank)) for stages, rank in alike.items()}
    return states[of_ranks[0]], max(states.values())


@lru_cache(maxsize=1 << 16)
def _held(alone: TrainingSetup, stage: StageLayers) -> float:
    """The activations of a micro-batch on a stage, if it is not cut."""
    whole = alone.but(segments=(), offloads=0.0)
    return float(unit_bytes(whole, stage).sum())


def _held_at_once(setup: TrainingSetup, parts: _LeastParts, segments: float) -> float:
    """The least bytes of activations on the first rank at its first backward."""
    if segments == inf:
        return _microbatches_at_once(setup, inf) * sum(parts.of_chunks)
    units = units_at_first_backward(setup.family, _shape_of(setup, int(segments)), setup.has_pairs)
    return sum(number / segments * held for number, held in zip(units, parts.of_chunks, strict=True))


def _shape_of(setup: TrainingSetup, segments: int) -> Shape:
    """The shape of the set-up once it is cut."""
    return Shape(setup.placement, setup.num_microbatches, segments)


def _microbatches_at_once(setup: TrainingSetup, segments: float) -> float:
    """The least number of micro-batches that the first rank holds after the last forward of each."""
    if setup.family in ("breadth-first", "gpipe"):  # backwards come after all forwards
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
    parts = _least_parts_of(setup)
    if not may_move(setup) or parts.fullest > budget.device or over > budget.host:
        return inf
    at_once = _microbatches_at_once(setup, segments)
    over_always = parts.first + at_once * sum(parts.of_chunks) - budget.device
    times = max(2, len(backwards_like_the_first(_shape_of(setup, segments), setup.has_pairs)))
    return max(times * over, setup.num_microbatches / ceil(at_once) * over_always) / budget.bandwidth


def least_seconds_copying(setup: TrainingSetup, machine: Machine, rank: int) -> float:
    """A lower bound from the units that a rank moves to its host. The time of parts that Megatron moves is that of its
    actions."""
    if setup.moves_parts or not setup.offloads:
        return 0.0
    seconds = {rank: seconds_alone(setup, machine, rank)}
    return _least_step(setup, machine, _compute_of_ranks(setup, machine), seconds)


def least_seconds_in_time(setup: TrainingSetup, machine: Machine, copies: CopyTimes | None = None) -> float:
    """A lower bound from compute and messages in simulated time: nothing moves to the host but `copies`, receives are
    posted at once, and messages share no port. Steps that are predicted from short ones have no such bound."""
    if is_extended(setup.shape):
        return 0.0
    stays = setup.but(offloads=0.0, layers_leaving=0) if setup.offloads and not setup.moves_parts else setup
    return _least_seconds_in_time(stays, machine, copies)


@lru_cache(maxsize=1 << 14)
def _least_seconds_in_time(setup: TrainingSetup, machine: Machine, copies: CopyTimes | None) -> float:
    costs = step_costs(setup, machine)
    pairs = pair_times(setup, machine) if setup.has_pairs else None
    ends = rank_ends(setup.family, setup.shape, setup.has_pairs).by(costs, pairs, copies)
    reduce, others = _ends(setup, machine)
    return max(ends[rank] + seconds for rank, seconds in reduce.items()) + others
