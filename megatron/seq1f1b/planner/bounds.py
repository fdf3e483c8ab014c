"""Lower bounds of the seconds of a step, by which a search leaves out what cannot be its answer.

Tested in planner/test_search.py.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..costs.machine import Machine, without_tiles
from ..costs.pair_times import pair_times
from ..costs.rank_without_messages import seconds_without_messages
from ..costs.simulator import ERROR_OF_EXTENDED, extended, is_extended
from ..costs.stage_times import first_passes, rows_of_stages, step_costs, step_end, sums_of_stage
from ..costs.training_setup import TrainingSetup, of_stages, stages_of
from ..schedule import Placement
from .pair_bounds import most_hidden
from .rank_ends import CopyTimes, rank_ends
from .space import evenly_cut


class _RankCompute(NamedTuple):
    """Seconds of compute on a rank: of a micro-batch, and of its first segment on the first of the rank's chunks."""

    work: float
    first_forward: float
    first_backward: float


def least_seconds(setup: TrainingSetup, machine: Machine) -> float:
    """A lower bound from the compute of each rank."""
    return _least_by_compute(setup, machine, _compute_of_ranks(setup, machine))


def _least_by_compute(
    setup: TrainingSetup, machine: Machine, of_ranks: Sequence[_RankCompute], waiting: float = 0.0
) -> float:
    """A lower bound if the first rank does not compute for `waiting` seconds."""
    seconds = {
        rank: setup.num_microbatches * of_ranks[rank].work - hidden
        for rank, hidden in enumerate(most_hidden(setup, machine))
    }
    seconds[0] += waiting
    return _least_step(setup, machine, of_ranks, seconds)


def _compute_of_ranks(setup: TrainingSetup, machine: Machine) -> Sequence[_RankCompute]:
    return _compute_by_placement(setup.layer_setup, machine, setup.placement, setup.layers_per_stage)


@lru_cache(maxsize=1 << 14)
def _compute_by_placement(
    layer_setup: TrainingSetup, machine: Machine, placement: Placement, layers_per_stage: tuple[int, ...]
) -> Sequence[_RankCompute]:
    """The same; set-ups share it that differ in the number of micro-batches, or in their replicas."""
    rows = rows_of_stages(layer_setup, machine, layers_per_stage)
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
def least_compute_of_ranks(
    layer_setup: TrainingSetup, machine: Machine, placement: Placement, layers_per_stage: tuple[int, ...]
) -> Sequence[_RankCompute]:
    """Seconds at least for every cut into as many segments, by an even one: no first segment is shorter there."""
    model = layer_setup.model
    works = of_stages(model, layers_per_stage, lambda stage: sum(map(max, sums_of_stage(layer_setup, machine, stage))))
    stages = stages_of(model, layers_per_stage)
    found = []
    for rank in range(placement.num_ranks):
        of_rank = placement.stages_of(rank)
        first = first_passes(layer_setup, machine, stages[of_rank[0]])
        work = sum(map(works.__getitem__, of_rank))
        found.append(_RankCompute(work, first.forward, first.backward))
    return found


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


def least_seconds_cut(setup: TrainingSetup, machine: Machine, segments: int, waiting: float = 0.0) -> float:
    """A lower bound for all cuts into this number of segments, if the first rank does not compute for `waiting`
    seconds."""
    evenly = evenly_cut(setup.layer_setup, segments)
    if evenly is None:
        return 0.0
    of_any = of_any_cut(machine, segments)
    least = least_compute_of_ranks(evenly.layer_setup, of_any, setup.placement, setup.layers_per_stage)
    if setup.has_pairs:  # what these hide depends on the segments
        setup = setup.but(segments=evenly.segments, cp_comm_type=evenly.cp_comm_type)
    return _least_by_compute(setup, of_any, least, waiting)


def of_any_cut(machine: Machine, segments: int) -> Machine:
    """The machine on which an even cut into `segments` takes least: the tiles of single lengths do not count."""
    return machine if segments == 1 else without_tiles(machine)


def unevenness_of_segments(setup: TrainingSetup, machine: Machine) -> float:
    """How many times as long as a mean segment the longest one takes, on a stage inside the model: ranks run different
    segments at a time, and wait for the longest."""
    rows = rows_of_stages(setup.layer_setup, machine, setup.layers_per_stage)
    seconds = [*map(sum, zip(*rows[len(rows) // 2], strict=True))]
    return max(seconds) * len(seconds) / sum(seconds)


def least_seconds_copying(setup: TrainingSetup, machine: Machine, rank: int) -> float:
    """A lower bound from the units that a rank moves to its host. The time of parts that Megatron moves is that of its
    actions."""
    if setup.moves_parts or not setup.offloads:
        return 0.0
    seconds = {rank: seconds_without_messages(setup, machine, rank)}
    return _least_step(setup, machine, _compute_of_ranks(setup, machine), seconds)


def least_seconds_in_time(setup: TrainingSetup, machine: Machine, copies: CopyTimes | None = None) -> float:
    """A lower bound from compute and messages in simulated time: nothing moves to the host but `copies`, receives are
    posted at once, and messages share no port. Where a step is predicted from short ones, so is its bound, without
    copies, which follow from all of its micro-batches."""
    stays = setup.but(offloads=0.0, layers_leaving=0) if setup.offloads and not setup.moves_parts else setup
    if not is_extended(setup.shape):
        return _least_seconds_in_time(stays, machine, copies)

    def of_short(num_microbatches: int) -> list[float]:
        return [_least_seconds_in_time(stays.but(num_microbatches=num_microbatches), machine, None)]

    (seconds,) = extended(setup.shape, of_short)
    return (1 - ERROR_OF_EXTENDED) * seconds


@lru_cache(maxsize=1 << 14)
def _least_seconds_in_time(setup: TrainingSetup, machine: Machine, copies: CopyTimes | None) -> float:
    costs = step_costs(setup, machine)
    pairs = pair_times(setup, machine) if setup.has_pairs else None
    ends = rank_ends(setup.family, setup.shape, setup.has_pairs).by(costs, pairs, copies)
    reduce, others = _ends(setup, machine)
    return max(ends[rank] + seconds for rank, seconds in reduce.items()) + others
