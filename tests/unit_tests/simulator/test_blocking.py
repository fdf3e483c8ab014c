"""Ranks that wait for every message."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.seq1f1b.schedule import Costs, Placement, Shape, build, simulate
from megatron.seq1f1b.simulator import execute_blocking

SHAPES = st.builds(
    Shape,
    st.builds(Placement, st.integers(1, 4), st.integers(1, 3)),
    num_microbatches=st.integers(1, 6),
    num_segments=st.integers(1, 4),
)


@given(SHAPES, st.sampled_from(("1f1b", "gpipe")))
@settings(max_examples=60, deadline=None)
def test_every_action_runs_and_never_earlier_than_where_messages_overlap(shape, family):
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
