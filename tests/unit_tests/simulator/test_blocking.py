"""Ranks that wait for every message."""

from itertools import product

import pytest

from megatron.seq1f1b.schedule import Costs, Placement, Shape, build, simulate
from megatron.seq1f1b.simulator import execute_blocking

# With several chunks Megatron, too, takes whole groups of as many micro-batches as there are ranks.
CASES = [
    (family, Shape(Placement(ranks), microbatches, segments))
    for family, ranks, microbatches, segments in product(("1f1b", "gpipe"), (1, 2, 4), (1, 3, 5), (1, 2, 4))
] + [("1f1b", Shape(Placement(ranks, 2), 2 * ranks, segments)) for ranks, segments in ((2, 1), (4, 1), (2, 2), (4, 4))]


@pytest.mark.parametrize(("family", "shape"), CASES, ids=str)
def test_every_action_runs_and_never_earlier_than_where_messages_overlap(family, shape):
    schedule = build(family, shape)
    costs = Costs.uniform(shape, message=0.25)
    blocking, free = execute_blocking(schedule, costs), simulate(schedule, costs)
    assert [[span.action for span in spans] for spans in blocking.ranks] == [list(rank) for rank in schedule.ranks]
    assert blocking.makespan >= free.makespan - 1e-9


def test_without_messages_to_wait_for_it_is_the_time_of_the_schedule():
    shape = Shape(Placement(4), 8)
    schedule, costs = build("1f1b", shape), Costs.uniform(shape)
    assert execute_blocking(schedule, costs).makespan == simulate(schedule, costs).makespan


def test_one_rank_waits_for_the_slow_exchange_of_its_neighbours():
    """Two ranks, one micro-batch: forward, message, forward and backward, message, backward."""
    shape = Shape(Placement(2), 1)
    costs = Costs.uniform(shape, f=1, i=1, w=1, message=0.5)
    assert execute_blocking(build("1f1b", shape), costs).makespan == pytest.approx(1 + 0.5 + 1 + 2 + 0.5 + 2)


def test_a_schedule_that_needs_messages_ahead_is_a_mistake_and_no_hang():
    shape = Shape(Placement(4, 2), 3)
    with pytest.raises(ValueError, match="ranks that wait for every message cannot run this schedule to its end"):
        execute_blocking(build("gpipe", shape), Costs.uniform(shape))
