"""One rank of a pipeline in simulated time, as if its messages had always arrived: no step takes less.

Tested in planner/test_search.py by test_without_messages_a_rank_takes_no_longer.
"""

from dataclasses import replace
from functools import lru_cache

from ..schedule import MOVE_KINDS, Action, Costs, Placement, Schedule, Shape, clock_of, units_to_move, with_moves
from .execution import execute_lowered
from .host_link import copy_seconds, layers_on_link
from .machine import Machine
from .pair_times import pair_times
from .stage_times import stage_rows
from .training_setup import TrainingSetup


def seconds_without_messages(setup: TrainingSetup, machine: Machine, rank: int) -> float:
    """Seconds from the first action of a rank to its last, with its copies of whole units to the host and back, but
    without collectives."""
    stages = setup.placement.stages_of(rank)
    rows = stage_rows(setup, machine)
    nothing = ((0.0,) * len(setup.segments),) * len(stages)
    costs = Costs(
        f=tuple(rows[stage].f for stage in stages),
        i=tuple(rows[stage].i for stage in stages),
        w=tuple(rows[stage].w for stage in stages),
        message_f=nothing,
        message_b=nothing,
        activation=nothing,
        activation_for_w=nothing,
    )
    pairs = pair_times(setup, machine).of_stages(stages) if setup.hides_experts else None
    schedule = _schedule_of_rank(setup.family, setup.shape, rank, setup.offloads, setup.has_pairs, setup.moves_by_layer)
    copies = copy_seconds(setup, machine, stages)
    side_seconds = dict.fromkeys(MOVE_KINDS, copies)
    return execute_lowered(schedule, costs, side_seconds, pairs, layers_on_link(setup, stages)).makespan


@lru_cache(maxsize=256)
def _schedule_of_rank(
    family: str, shape: Shape, rank: int, offloads: float, has_pairs: bool, by_layer: bool
) -> Schedule:
    """The order of one rank as that of a pipeline of one rank, whose stages are the model chunks."""
    clock = clock_of(family, shape, has_pairs)
    order = clock.order(rank)
    paired = clock.pairs_in(order)
    chunk_of = shape.placement.chunk_of

    def by_chunk(action: Action) -> Action:
        kind, stage, microbatch, segment = action
        return Action(kind, chunk_of(stage), microbatch, segment)

    moving = with_moves(order, units_to_move(order, offloads, paired, by_layer), paired, by_layer)
    one_rank = replace(shape, placement=Placement(1, shape.num_chunks))
    return Schedule(one_rank, (tuple(map(by_chunk, moving)),), frozenset(map(by_chunk, paired)))
