from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.schedule import (
    FAMILIES,
    Costs,
    Kind,
    Placement,
    Shape,
    auto,
    build,
    peak_memory,
    simulate,
    validate,
)
from megatron.seq1f1b.schedule.automatic import shortest_makespan
from megatron.seq1f1b.schedule.list_scheduling import ListScheduler

from . import strategies
from .strategies import few, shapes


@few
@given(st.data(), shapes(ranks=5, microbatches=6, segments=4, chunks=3), st.floats(1, 2), st.booleans())
def test_never_slower_than_a_named_family_that_fits(data, shape, room, split):
    costs = data.draw(strategies.costs(shape))
    limit = max(peak_memory(build("1f1b", shape), costs)) * room
    schedule = auto(shape, costs, limit, split)
    validate(schedule)
    assert max(peak_memory(schedule, costs)) <= limit + 1e-6
    assert split or not any(action.kind is Kind.I for actions in schedule.ranks for action in actions)
    makespan = simulate(schedule, costs).makespan
    assert makespan >= shortest_makespan(simulate(build("1f1b", shape), costs)) * (1 - 1e-9)
    for family in FAMILIES:
        named = build(family, shape)
        if max(peak_memory(named, costs)) <= limit and (split or family != "zb-h1"):
            assert makespan <= simulate(named, costs).makespan


@pytest.mark.parametrize("placement, goal", [(Placement(8), 0.07), (Placement(8, 2, "v"), 0.04)])
def test_bubble_ratio_at_the_memory_of_1f1b(placement, goal):
    shape = Shape(placement, 8, 4)
    schedule = build("auto", shape)
    validate(schedule)
    # 1F1B with one chunk holds 11 units on rank 0; with C chunks a unit is C times smaller.
    assert max(peak_memory(schedule, Costs.uniform(shape))) <= 11 * placement.num_chunks
    assert simulate(schedule).bubble_ratio <= goal


@few
@given(shapes(ranks=6, microbatches=6, segments=4, chunks=3))
def test_one_micro_batch_is_enough_and_limits_may_differ(shape):
    limits = [shape.num_chunks * shape.num_segments + rank % 3 for rank in range(shape.num_ranks)]
    schedule = auto(shape, limits=limits)
    validate(schedule)
    peaks = peak_memory(schedule, Costs.uniform(shape))
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    with pytest.raises(ValueError, match="one micro-batch takes 4 of activation memory on rank 0, the limit is 3"):
        auto(Shape(Placement(2), 2, 4), limits=3)


def test_more_memory_makes_shorter_steps():
    """So does a W that holds less than an F, with the same limit; and nothing is longer."""
    shape = Shape(Placement(4), 6, 3)
    ones = Costs.uniform(shape)
    part = replace(ones, activation_for_w=((0.25,) * 3,) * 4)
    makespans = []
    for limit in (4, 5, 6):
        tight, loose = auto(shape, ones, limit), auto(shape, part, limit)
        assert max(peak_memory(loose, part)) <= limit
        makespans.append((simulate(tight, ones).makespan, simulate(loose, part).makespan))
    assert makespans[0] > makespans[1] > makespans[2]
    assert all(loose <= tight for tight, loose in makespans)
    assert any(loose < tight for tight, loose in makespans)


def test_of_equally_short_plans_one_whose_ranks_are_done_soonest():
    """As in ZB-2p, where ranks begin and end on their own: with twice the memory of 1F1B."""
    shape = Shape(Placement(8), 24)
    timeline = simulate(auto(shape, limits=16))
    assert timeline.makespan == shortest_makespan(simulate(build("1f1b", shape))) == 79
    assert timeline.longest_stretch <= 72


def test_unequal_segments_are_within_4_percent_of_the_optimum():
    """An exhaustive search finds 126 here, and orders by ticks alone 141."""
    shape = Shape(Placement(3, 2, "v"), 2, 3)
    costs = Costs.from_mapping(shape, {"f": [5, 4, 4], "i": [3, 6, 3], "w": [2, 1, 1]})
    schedule = auto(shape, costs)
    assert simulate(schedule, costs).makespan <= 131
    assert schedule == auto(shape, costs), "every rank comes to the same plan"


def test_the_search_of_a_long_step_ends_where_nothing_is_shorter(monkeypatch):
    monkeypatch.setattr(ListScheduler, "schedule_by", lambda *_: pytest.fail("a plan too many"))
    shape = Shape(Placement(16), 64, 8)
    assert auto(shape) == build("zb-h1", shape)


def test_cost_tables_are_checked():
    shape = Shape(Placement(2), 2, 2)
    ones = Costs.uniform(shape)
    for wrong, message in (
        (replace(ones, f=((1.0,),)), "cost table 'f' must have 2 stages of 2 segments"),
        (replace(ones, w=((-1.0, 1.0),) * 2), "cost table 'w' holds a number that is negative or not finite"),
        (replace(ones, activation_for_w=((2.0, 2.0),) * 2), "'activation_for_w' is part of 'activation'"),
    ):
        with pytest.raises(ValueError, match=message):
            auto(shape, wrong)
