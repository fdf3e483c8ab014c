"""Set-ups are keys of caches: equal by their fields, with shared set-ups of what matters to a part of their costs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.stage_times import step_end
from megatron.seq1f1b.costs.training_setup import Moves, choices_of
from unit_tests.planner.question import candidates, small


def test_equal_set_ups_are_equal_by_their_fields():
    setup = next(iter(candidates(small()))).setup
    assert setup == replace(setup) and hash(setup) == hash(replace(setup))
    assert setup != setup.but(num_microbatches=setup.num_microbatches + 1)
    assert setup != "a set-up"


def test_set_ups_alike_in_layers_share_one():
    setup = next(iter(candidates(small()))).setup
    other = setup.but(num_microbatches=setup.num_microbatches + 1, overlaps_data_parallel=True)
    assert setup.layer_setup is other.layer_setup
    assert setup.layer_setup is not setup.but(sequence_parallel=not setup.sequence_parallel).layer_setup


@pytest.mark.parametrize(
    "settings, replays",
    [
        ({}, False),
        ({"cuda_graph_impl": "none", "cuda_graph_modules": ["attn", "mlp"]}, False),
        ({"cuda_graph_modules": ["attn", "mlp"]}, True),
        ({"cuda_graph_modules": ["attn"]}, False),
        ({"cuda_graph_modules": [SimpleNamespace(name="attn"), SimpleNamespace(name="mlp")]}, True),
        ({"cuda_graph_modules": ["attn", "mlp"], "num_experts": 8}, False),
        ({"cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"], "num_experts": 8}, True),
        ({"cuda_graph_modules": []}, True),
        ({"cuda_graph_scope": "full"}, True),
    ],
)
def test_graphs_of_a_launch_replay_layers(settings, replays):
    graphs = {"cuda_graph_impl": "transformer_engine"} if settings else {}
    assert choices_of(graphs | settings, (4, 4), keeps_attention=False)["replays_layers"] == replays


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
