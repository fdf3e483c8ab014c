"""What a step takes where the software does it in another way than this package."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.planning.costs.layer_times import layer_time
from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.operations import moving_time
from megatron.seq1f1b.planning.costs.stage_times import message_times, stage_rows
from megatron.seq1f1b.planning.costs.training_setup import Software, TrainingSetup
from megatron.seq1f1b.schedule import Placement

MACHINE = read_machine("v100-p3")
LENGTH = 2048
SETUP = TrainingSetup(
    ModelShape(8, 4096, 16384, 32, 128, 0),
    sequence_length=LENGTH,
    num_microbatches=8,
    tensor_parallel=8,
    placement=Placement(4),
    software=Software(flash_attention=False, gradient_bytes=2),
)


def test_weight_gradients_that_are_added_last_are_the_w():
    """Each of 2 layers reads two numbers and writes one, of 2 bytes; nothing else moves from the backward to the W."""
    last = replace(SETUP, software=replace(SETUP.software, adds_gradients_last=True))
    parameters = 2 * SETUP.layer_parameters()
    _, (within,), (products,) = stage_rows(SETUP, MACHINE)[1]
    _, (before,), (addition,) = stage_rows(last, MACHINE)[1]
    assert addition == pytest.approx(moving_time(MACHINE.device, 6 * parameters, 2))
    assert before == pytest.approx(within + products)


def test_softmax_in_three_kernels_moves_sixteen_bytes_a_score_each_way_in_place_of_four_and_six():
    apart = replace(SETUP, software=replace(SETUP.software, fuses_kernels=False))
    fused, unfused = (layer_time(each, MACHINE, 0, LENGTH) for each in (SETUP, apart))
    scores = LENGTH**2 * SETUP.model.num_heads / 8
    forward, back = moving_time(MACHINE.device, 12 * scores, 2), moving_time(MACHINE.device, 10 * scores, 1)
    assert unfused.forward_attention - fused.forward_attention == pytest.approx(forward)
    assert unfused.input_attention - fused.input_attention == pytest.approx(back)


def test_one_rank_that_sends_all_of_a_message_has_the_network_to_itself():
    whole = replace(SETUP, software=replace(SETUP.software, scatters_messages=False))
    (_, (scattered,), *_), _ = message_times(SETUP, MACHINE)
    (_, (alone,), *_), _ = message_times(whole, MACHINE)
    size, network = 2 * LENGTH * SETUP.model.hidden_size, MACHINE.network
    assert scattered - alone == pytest.approx(size / network.bandwidth - size / network.message_bandwidth)
