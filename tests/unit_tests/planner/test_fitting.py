"""What is fullest, and what has to move so that it fits."""

import pytest

from megatron.seq1f1b.commands.gain_map import with_links
from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planner.fitting import layers_leaving, memory_in_flight
from megatron.seq1f1b.schedule import Placement, build


def test_ranks_of_dense_layers_are_not_fullest():
    """The second rank of DeepSeek-V3 has as many layers as others, but two of them without experts."""
    setup = TrainingSetup(
        preset("deepseek-v3"),
        4096,
        32,
        data_parallel=8,
        expert_parallel=8,
        placement=Placement(16, 2),
        layers_per_stage=(1, *[2] * 14, 1, *[2] * 15, 1),
    )
    of_all = [rank_memory(setup, order, rank).total for rank, order in enumerate(build("1f1b", setup.shape).ranks)]
    assert max(each.total for each in memory_in_flight(setup)) == pytest.approx(max(of_all))


@pytest.mark.parametrize("bandwidth, enough", [(1e12, 2), (1e9, 16)])
def test_slow_links_have_more_layers_leaving(bandwidth, enough):
    """So that no forward waits, up to all of a stage."""
    machine = with_links(read_machine("h100-80gb"), bandwidth=50e9, host_bandwidth=bandwidth)
    setup = TrainingSetup(preset("7b"), 8192, 8, placement=Placement(2))
    assert set(layers_leaving(setup, machine)) == {2, enough}
