"""Long steps, estimated from short ones, are what a simulation of the whole gives."""

import random

import pytest

from megatron.seq1f1b.planning.simulator import estimate
from megatron.seq1f1b.planning.simulator.estimate import extended
from megatron.seq1f1b.schedule import FAMILIES, Costs, Placement, Shape, build, peak_memory, simulate

LONG = [(family, *sizes) for family in FAMILIES for sizes in ((4, 1, 37, 3), (3, 1, 41, 2), (2, 2, 23, 4))]


@pytest.fixture(autouse=True)
def every_step_counts_as_long(monkeypatch):
    monkeypatch.setattr(estimate, "_MOST_ACTIONS", 0)


def step(family, shape, costs):
    schedule = build(family, shape)
    timeline = simulate(schedule, costs)
    return [timeline.makespan, timeline.bubble_ratio * timeline.makespan, *peak_memory(schedule, costs)]


@pytest.mark.parametrize("family, ranks, chunks, microbatches, segments", LONG)
def test_a_long_step_is_as_simulated(family, ranks, chunks, microbatches, segments):
    shape = Shape(Placement(ranks, chunks), microbatches, segments)
    draw = random.Random(1).uniform
    rows = [[draw(1, 2) for _ in range(segments)] for _ in range(shape.num_stages)]
    costs = Costs.from_mapping(shape, {"f": rows, "i": 1.3, "w": 0.7})
    built = []

    def measured(count):
        built.append(count)
        return step(family, Shape(shape.placement, count, segments), costs)

    found = extended(shape, measured)
    assert max(built) < microbatches and found == pytest.approx(step(family, shape, costs))


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("ranks, style, segments, seed", [(8, "v", 8, 24), (8, "v", 8, 1), (6, "looped", 4, 11)])
def test_stages_of_unequal_costs_take_longer_to_settle(family, ranks, style, segments, seed):
    """Where the growth of short steps alone is 2 % off."""
    shape, draw = Shape(Placement(ranks, 2, style), 100, segments), random.Random(seed).uniform
    rows = {name: [[draw(0.8, 1.3)] * segments for _ in range(shape.num_stages)] for name in "fiw"}
    costs = Costs.from_mapping(shape, rows)
    found = extended(shape, lambda count: step(family, Shape(shape.placement, count, segments), costs)[:1])
    assert found[0] == pytest.approx(step(family, shape, costs)[0], rel=0.01)
