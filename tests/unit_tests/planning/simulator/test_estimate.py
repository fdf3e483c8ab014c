"""Long steps, estimated from short ones, are what a simulation of the whole gives."""

import random

import pytest

from megatron.seq1f1b.planning.simulator import estimate, estimate_step
from megatron.seq1f1b.schedule import FAMILIES, Costs, Placement, Shape, build, peak_memory, simulate


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks, chunks, microbatches, segments", [(4, 1, 37, 3), (3, 1, 41, 2), (2, 2, 23, 4)])
def test_a_long_step_is_as_simulated(monkeypatch, family, ranks, chunks, microbatches, segments):
    monkeypatch.setattr(estimate, "_FEW_UNITS", 0)
    shape = Shape(Placement(ranks, chunks), microbatches, segments)
    draw = random.Random(1).uniform
    rows = [[draw(1, 2) for _ in range(segments)] for _ in range(shape.num_stages)]
    costs = Costs.from_mapping(shape, {"f": rows, "i": 1.3, "w": 0.7})
    built = []

    def schedule_of(count):
        built.append(count)
        return build(family, Shape(shape.placement, count, segments))

    found = estimate_step(schedule_of, microbatches, costs)
    assert max(built) < microbatches
    whole = build(family, shape)
    timeline = simulate(whole, costs)
    assert found.seconds == pytest.approx(timeline.makespan)
    assert found.bubble == pytest.approx(timeline.bubble_ratio)
    assert found.activations == pytest.approx(peak_memory(whole, costs))


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("ranks, style, segments, seed", [(8, "v", 8, 24), (8, "v", 8, 1), (6, "looped", 4, 11)])
def test_stages_of_unequal_costs_take_longer_to_settle(family, ranks, style, segments, seed, monkeypatch):
    """Where the growth of short steps alone is 2 % off."""
    monkeypatch.setattr(estimate, "_FEW_UNITS", 0)
    placement, draw = Placement(ranks, 2, style), random.Random(seed).uniform
    rows = {name: [[draw(0.8, 1.3)] * segments for _ in range(placement.num_stages)] for name in "fiw"}
    costs = Costs.from_mapping(Shape(placement, 1, segments), rows)

    def schedule_of(count):
        return build(family, Shape(placement, count, segments))

    found, whole = estimate_step(schedule_of, 100, costs), simulate(schedule_of(100), costs)
    assert found.seconds == pytest.approx(whole.makespan, rel=0.01)
