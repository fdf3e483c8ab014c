"""What mixtures of experts take: weights, memory, and times that follow from the tokens of an expert."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.planning.costs.blocks import parameters_of_model
from megatron.seq1f1b.planning.costs.layer_bytes import layer_activation, layer_kept_for_weights, layer_moved
from megatron.seq1f1b.planning.costs.layer_times import layer_time, repeated_time
from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.costs.model_shape import Experts
from megatron.seq1f1b.planning.costs.stage_costs import analytic_costs
from megatron.seq1f1b.planning.costs.step_memory import rank_memory
from megatron.seq1f1b.planning.costs.training_setup import TrainingSetup
from megatron.seq1f1b.schedule import Placement, build

MACHINE = read_machine("h100-80gb")
SIZES = {"expert_parallel": 8, "data_parallel": 8, "placement": Placement(4), "distributed_optimizer": True}
SETUP = TrainingSetup(preset("mixtral-8x7b"), 8192, 4, **SIZES)


@pytest.mark.parametrize(
    "name, billions",
    [
        *[("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 405.9), ("mixtral-8x7b", 46.7)],
        *[("mixtral-8x22b", 141), ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235), ("deepseek-v3", 671)],
        *[("qwen3-next-80b", 80), ("gpt-oss-120b", 117)],
    ],
)
def test_the_presets_have_the_published_sizes(name, billions):
    assert parameters_of_model(preset(name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_one_expert_for_all_tokens_is_a_feed_forward_block():
    """A single expert that every token goes through computes what a dense layer does, and leaves as much to W."""
    dense = replace(SETUP.model, experts=None, expert_layers=())
    alone = replace(SETUP.model, experts=Experts(1, 1, SETUP.model.ffn_hidden_size))
    setups = [replace(SETUP, model=model, expert_parallel=1) for model in (dense, alone)]
    times = [layer_time(setup, MACHINE, 0, 8192) for setup in setups]
    assert times[1].forward.matmul == pytest.approx(times[0].forward.matmul, rel=0.01)
    assert times[1].weight == pytest.approx(times[0].weight, rel=0.01)
    kept = [layer_kept_for_weights(setup, 0, 0, 8192) for setup in setups]
    assert kept[1] == kept[0] < layer_activation(setups[1], 0, 0, 8192)
    planned = [analytic_costs(model, (32,), MACHINE.device)[0].weight(0, 8192) for model in (dense, alone)]
    assert planned[1] == pytest.approx(planned[0], rel=0.01)


def test_expert_parallelism_divides_the_experts_and_their_state():
    few, many = (replace(SETUP, expert_parallel=size) for size in (1, 8))
    assert many.layer_parameters()[1] == few.layer_parameters()[1] / 8
    memory = [rank_memory(setup, build("1f1b", setup.shape).ranks[0], 0) for setup in (few, many)]
    assert memory[1].weights < memory[0].weights / 3
    # The optimizer state is sharded over all replicas of a weight: as much on every rank either way.
    assert memory[1].optimizer == pytest.approx(memory[0].optimizer)


def test_layers_without_experts_are_counted_as_such():
    model = replace(SETUP.model, expert_layers=tuple(range(1, 32)))
    setup = replace(SETUP, model=model)
    assert [stage.layers for stage in setup.stages] == [((0, 1), (1, 7)), ((1, 8),), ((1, 8),), ((1, 8),)]
    assert setup.parameters[0][1] == 7 / 8 * setup.parameters[1][1]


def test_experts_computed_again_cost_a_forward_of_theirs():
    """DeepSeek-V3, whose first three layers are dense; its experts are 8 of 256 and one that all tokens share."""
    none = TrainingSetup(preset("deepseek-v3"), 8192, 1, expert_parallel=8, data_parallel=8)
    setup, residual = replace(none, recompute="moe"), 2 * 8192 * none.model.hidden_size
    assert [repeated_time(each, MACHINE, 0, 8192, layer) for each, layer in ((none, 9), (setup, 0))] == [0, 0]
    assert layer_activation(setup, 0, 0, 8192) == layer_activation(none, 0, 0, 8192)
    alone = replace(none.model, num_layers=1, pattern="E")
    of_experts, again = (replace(each, model=alone, layers_per_stage=()) for each in (none, setup))
    assert layer_activation(again, 0, 0, 8192) == 2 * residual < 0.15 * layer_activation(of_experts, 0, 0, 8192)
    moving = replace(again, offloads=1.0, offloads_modules=True)
    assert layer_moved(moving, 0, 0, 8192) == (residual, 0)
    forward = layer_time(of_experts, MACHINE, 0, 8192).forward.total
    assert repeated_time(again, MACHINE, 0, 8192, 0) == pytest.approx(forward, rel=0.05)
    assert repeated_time(setup, MACHINE, 0, 8192, 9) == repeated_time(again, MACHINE, 0, 8192, 0)


def test_experts_of_few_tokens_are_slow():
    setup = replace(SETUP, model=replace(preset("qwen3-30b-a3b"), num_layers=4, pattern="EEEE"), layers_per_stage=())
    time = [layer_time(setup, MACHINE, 0, length).forward.matmul / length for length in (128, 8192)]
    assert time[0] > 2 * time[1]
