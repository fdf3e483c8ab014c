"""Set-ups are keys of caches: equal by their fields, with shared set-ups of what matters to a part of their costs."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs import layer_times
from megatron.seq1f1b.costs.layer_bytes import unit_bytes
from megatron.seq1f1b.costs.layer_times import embedding_time, head_time
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.stage_times import step_end
from megatron.seq1f1b.costs.training_setup import ALL_BUT_ATTENTION, FULL, Fsdp, Moves, TrainingSetup, choices_of
from megatron.seq1f1b.schedule import Placement
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


MIXTURES = [
    TrainingSetup(
        preset(name),
        16384,
        num_microbatches=4,
        micro_batch_size=2,
        tensor_parallel=2,
        context_parallel=2,
        segments=segments,
        sequence_parallel=True,
        distributed_optimizer=True,
        recompute=recompute,
    )
    for name in ("deepseek-v3", "qwen3-next-80b", "gpt-oss-120b")
    for segments in ((16384,), (8192, 4096, 4096))
    for recompute in ("none", "layernorm mlp", "moe", FULL, ALL_BUT_ATTENTION)
]
BESIDE_ACTIVATIONS = {
    "data_parallel": 2,
    "expert_parallel": 8,
    "fsdp": Fsdp.PARAMETERS,
    "dispatches_once": True,
    "hides_experts": True,
    "hides_tensor_exchange": True,
    "replays_layers": True,
}


@pytest.mark.parametrize("name, value", BESIDE_ACTIVATIONS.items())
def test_set_ups_alike_in_activations_keep_as_much(name, value):
    machine = read_machine("h100-80gb")
    for setup in MIXTURES:
        other = setup.but(**{name: value})
        assert other.activation_setup is setup.activation_setup
        for stage in setup.stages:
            kept = unit_bytes(setup, stage)
            assert np.array_equal(kept, unit_bytes(other, stage))
            assert np.array_equal(kept, unit_bytes(setup.activation_setup, stage))
        for span in setup.spans:
            for time in (embedding_time, head_time):
                seconds = time(setup, machine, *span)
                assert seconds == time(other, machine, *span) == time(setup.activation_setup, machine, *span)


BESIDE_TIMES = {
    "data_parallel": 2,
    "fsdp": Fsdp.PARAMETERS,
    "keeps_logits": True,
    "fuses_loss": True,
    "replays_layers": True,
    "num_microbatches": 7,
}


@pytest.mark.parametrize("name, value", BESIDE_TIMES.items())
def test_set_ups_alike_in_the_time_of_a_layer_share_it(name, value):
    machine = read_machine("h100-80gb")
    for setup in MIXTURES:
        for alike in (setup, setup.but(recompute="layernorm moe")):
            other = alike.but(**{name: value})
            assert other.time_setup is alike.time_setup
            for layer, _ in setup.stages[0].layers:
                times = [layer_times.layer_times(same, machine, layer) for same in (alike, other, alike.time_setup)]
                again = [
                    [layer_times.repeated_time(same, machine, *span, layer) for span in setup.spans]
                    for same in (alike, other, alike.time_setup)
                ]
                assert times[0] == times[1] == times[2] and again[0] == again[1] == again[2]


def test_a_changed_set_up_has_the_layers_of_its_own_fields():
    """Whether or not it takes them from the one that it was made of."""
    changes = [
        {"family": "breadth-first"},
        {"family": "zb-h1"},
        {"num_microbatches": 7, "partitions_state": True},
        {"recompute": "layernorm", "num_microbatches": 7},
        {"placement": Placement(2), "layers_per_stage": ()},
    ]
    for setup, family, change in product(MIXTURES, ("1f1b", "zb-h1"), changes):
        given = replace(setup, family=family)
        assert given.layer_setup == replace(given).layer_setup
        assert given.but(**change).layer_setup == replace(given, **change).layer_setup


BESIDE_DENSE_BLOCKS = BESIDE_ACTIVATIONS | {"recompute": "core_attn", "keeps_logits": True, "fuses_loss": True}


@pytest.mark.parametrize("name, value", BESIDE_DENSE_BLOCKS.items())
def test_set_ups_alike_in_dense_blocks_take_as_long(name, value):
    machine = read_machine("h100-80gb")
    for setup in MIXTURES:
        other = setup.but(**{name: value})
        assert other.dense_setup is setup.dense_setup
        for layer, _ in setup.stages[0].layers:
            for start, end in setup.spans:
                times = [
                    layer_times._dense_time(alike, machine, alike.blocks(layer), start, end, layer)
                    for alike in (setup, other, setup.dense_setup)
                ]
                assert times[0] == times[1] == times[2]


def test_changes_beside_the_state_keep_its_set_up():
    setup = MIXTURES[0]
    state = setup.state_setup
    assert setup.but(recompute=FULL, segments=(8192, 8192)).state_setup is state
    assert setup.but(fsdp=setup.fsdp, family="zb-h1").state_setup is state
    assert setup.but(fsdp=Fsdp.OPTIMIZER).state_setup == state.but(fsdp=Fsdp.OPTIMIZER)
