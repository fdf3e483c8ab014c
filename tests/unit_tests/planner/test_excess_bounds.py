"""Copies of what exceeds the memory of the first rank take no longer in a bound than in a step."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from megatron.seq1f1b.costs.model_shape import Experts
from megatron.seq1f1b.costs.training_setup import Moves, TrainingSetup
from megatron.seq1f1b.planner.bounds import least_seconds_in_time
from megatron.seq1f1b.planner.excess_bounds import copy_times, least_seconds_with_copies
from megatron.seq1f1b.planner.fitting import fitted, layers_leaving
from megatron.seq1f1b.planner.memory_bounds import least_bytes
from megatron.seq1f1b.planner.search import first_that_fits, predict_candidate
from megatron.seq1f1b.planner.space import Candidate, MemoryBudget
from megatron.seq1f1b.schedule import Placement
from unit_tests.planner.question import MODEL, linked

LENGTH = 65536
DENSE = replace(MODEL, num_layers=12)
MIXTURE = replace(DENSE, experts=Experts(4, 2, 1024), expert_layers=tuple(range(DENSE.num_layers)))


def drawn(draw, in_pairs):
    """A random set-up."""
    segments = draw.choice((1, 2, 4, 8))
    setup = TrainingSetup(
        MIXTURE if in_pairs else DENSE,
        LENGTH,
        draw.randint(2, 12),
        placement=Placement(draw.choice((1, 2, 4)), draw.randint(1, 3)),
        segments=(LENGTH // segments,) * segments,
    )
    return setup.but(expert_parallel=2, data_parallel=2, hides_experts=True) if in_pairs else setup


@pytest.mark.parametrize("way", ["whole", "by layer", "in pairs"])
def test_no_step_is_shorter_than_with_these_copies(way):
    """Random set-ups on devices too small by a random part of what their activations take. Over a slow link the bound
    is often closer than that of compute alone."""
    draw = Random(way)
    by_layer = way == "by layer"
    moving = 0
    closer = 0
    while moving < 80:
        setup = drawn(draw, in_pairs=way == "in pairs")
        question = linked(draw.choice((2e9, 1e10, 5e10)), model=setup.model)
        machine = question.machine
        device = draw.uniform(0.5, 1.0) * least_bytes(setup, len(setup.segments))
        budget = MemoryBudget(device, host=1e15, bandwidth=machine.device.host_bandwidth)
        leaving = draw.choice(layers_leaving(setup, machine)) if by_layer else 0
        found = fitted(setup.but(layers_leaving=leaving), budget, Moves.UNITS)
        if found is None:
            continue
        plan = first_that_fits(Candidate(found), budget, partial(predict_candidate, question=question))
        if plan is None:
            continue
        copies = copy_times(setup, machine, budget, by_layer)
        least = least_seconds_with_copies(setup, machine, copies)
        in_time = least_seconds_in_time(setup, machine, copies)
        assert 0 < least <= in_time * (1 + 1e-9) <= plan.seconds * (1 + 1e-8)
        moving += 1
        closer += in_time > 1.05 * least_seconds_in_time(setup, machine)
    assert closer
