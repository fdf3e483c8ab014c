"""Set-ups are keys of caches: equal by their fields, with shared set-ups of what matters to a part of their costs."""

from dataclasses import replace

from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.stage_times import step_end
from megatron.seq1f1b.costs.training_setup import Moves
from unit_tests.planner.question import candidates, small


def test_equal_set_ups_are_equal_by_their_fields():
    setup = next(iter(candidates(small()))).setup
    assert setup == replace(setup) and hash(setup) == hash(replace(setup))
    assert setup != setup.but(num_microbatches=setup.num_microbatches + 1)
    assert setup != "a set-up"


def test_set_ups_alike_in_layers_share_one():
    setup = next(iter(candidates(small()))).setup
    other = setup.but(num_microbatches=setup.num_microbatches + 1, overlaps_data_parallel=True)
    assert setup.alone is other.alone
    assert setup.alone is not setup.but(sequence_parallel=not setup.sequence_parallel).alone


def test_set_ups_alike_in_their_state_end_a_step_alike():
    """Whatever differs in activations alone; what matters to the state does not."""
    machine = read_machine("a100-80gb")
    changes = {"recompute": "none", "offloads": 0.5, "moves": Moves.MODULES, "micro_batch_size": 2, "family": "zb-h1"}
    ends = set()
    for candidate in candidates(small()):
        setup = candidate.setup
        for rank in range(setup.pipeline_parallel):
            end = step_end(setup, machine, rank)
            assert end == step_end(setup.but(**changes), machine, rank)
            ends.add(end)
    assert len(ends) > 1
