"""Megatron's copies of modules before the first backward take no longer in a bound than in a step."""

from dataclasses import replace
from functools import partial
from math import inf
from random import Random

import pytest

from megatron.seq1f1b.costs.model_shape import Experts
from megatron.seq1f1b.costs.training_setup import Moves, TrainingSetup
from megatron.seq1f1b.planner.bounds import least_seconds, least_seconds_in_time
from megatron.seq1f1b.planner.fitting import fitted
from megatron.seq1f1b.planner.memory_bounds import least_bytes
from megatron.seq1f1b.planner.module_bounds import least_seconds_moving_modules, least_seconds_moving_modules_in_time
from megatron.seq1f1b.planner.search import first_that_fits, predict_candidate
from megatron.seq1f1b.planner.space import Candidate, MemoryBudget
from megatron.seq1f1b.schedule import Placement
from unit_tests.planner.question import MODEL, linked

LENGTH = 32768
DENSE = replace(MODEL, num_layers=16)
MIXTURE = replace(DENSE, experts=Experts(4, 2, 1024), expert_layers=tuple(range(4, DENSE.num_layers)))


def drawn(draw, in_pairs):
    """A random set-up in a pipeline."""
    setup = TrainingSetup(
        MIXTURE if in_pairs else DENSE,
        LENGTH,
        draw.choice((4, 8, 12)),
        placement=Placement(draw.choice((2, 4)), draw.choice((2, 4) if in_pairs else (1, 2, 4))),
        recompute=draw.choice(("none", "none", "layernorm", "mlp")),
        sequence_parallel=draw.random() < 0.5,
        tensor_parallel=draw.choice((1, 2)),
    )
    return setup.but(expert_parallel=2, data_parallel=2, hides_experts=True) if in_pairs else setup


@pytest.mark.parametrize("in_pairs", [False, True], ids=["plain", "in pairs"])
def test_no_step_is_shorter_than_with_these_modules(in_pairs):
    """Random set-ups on devices too small by a random part of what their activations take, with links of many speeds.
    What a bound takes for too large is too large. Over a slow link the bounds are closer than that of compute alone."""
    draw = Random(in_pairs)
    too_large = 0
    shares = []
    while len(shares) < 80:
        setup = drawn(draw, in_pairs)
        question = linked(draw.choice((4e9, 1e10, 3e10)), model=setup.model)
        machine = question.machine
        device = draw.uniform(0.4, 1.05) * least_bytes(setup, 1)
        budget = MemoryBudget(device, host=1e15, bandwidth=machine.device.host_bandwidth)
        least = least_seconds_moving_modules(setup, machine, device)
        in_time = least_seconds_moving_modules_in_time(setup, machine, device)
        moved = fitted(setup, budget, Moves.MODULES)
        predicted = partial(predict_candidate, question=question)
        plan = None if moved is None else first_that_fits(Candidate(moved), budget, predicted)
        if plan is None:
            too_large += least == in_time == inf
            continue
        assert 0 < least <= plan.seconds * (1 + 1e-9) and 0 < in_time <= plan.seconds * (1 + 1e-9)
        assert least >= least_seconds(setup, machine) * (1 - 1e-9)
        shares.append((max(least, in_time), least_seconds_in_time(setup, machine)))
    closer = [bound / of_compute for bound, of_compute in shares]
    assert sum(share > 1.05 for share in closer) > 10
    assert too_large > 5
