"""What the programs of the papers take where they do something in another way than this package."""

from dataclasses import fields, replace

import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.planning.costs.layer_bytes import (
    backward_working,
    layer_activation,
    layer_keys_values,
    loss_bytes,
)
from megatron.seq1f1b.planning.costs.layer_times import layer_time
from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.operations import moving_time
from megatron.seq1f1b.planning.costs.stage_times import step_costs
from megatron.seq1f1b.planning.costs.step_memory import activation_tables, rank_memory
from megatron.seq1f1b.planning.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planning.simulator import predict
from megatron.seq1f1b.schedule import Placement, build
from paper.programs import PaperSetup

WHOLE = TrainingSetup(preset("30b"), 65536, 8, placement=Placement(8))
SHARED = replace(WHOLE, tensor_parallel=8, sequence_parallel=True)
UNIT = WHOLE.sequence_length * WHOLE.model.hidden_size  # a byte for each token and hidden unit

MACHINE = read_machine("v100-p3")
LENGTH = 2048
SETUP = PaperSetup(
    ModelShape(8, 4096, 16384, 32, 128, 0),
    sequence_length=LENGTH,
    num_microbatches=8,
    tensor_parallel=8,
    placement=Placement(4),
    flash_attention=False,
    gradient_bytes=2,
)


def paper(setup: TrainingSetup, **changes) -> PaperSetup:
    return PaperSetup(**(vars_of(setup) | changes))


def vars_of(setup: TrainingSetup) -> dict:
    return {field.name: getattr(setup, field.name) for field in fields(setup)}


@pytest.mark.parametrize(
    "changes", [{}, {"recompute": "core_attn"}, {"recompute": "full"}, {"family": "zb-h1"}], ids=str
)
def test_a_program_without_differences_is_the_package(changes):
    ours = replace(SHARED, sequence_length=8192, segments=(4096, 2048, 2048), **changes)
    machine, theirs = read_machine("a100-80gb"), paper(ours)
    found, expected = predict(theirs, machine), predict(ours, machine)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-12)
    assert found.memory == expected.memory


def test_weight_gradients_that_are_added_last_are_the_w():
    """Each of 2 layers reads two numbers and writes one, of 2 bytes; nothing else moves from the backward to the W."""
    last = replace(SETUP, adds_gradients_last=True)
    parameters = 2 * SETUP.layer_parameters()
    usual, apart = step_costs(replace(SETUP, gradient_bytes=0), MACHINE), step_costs(last, MACHINE)
    (within,), (products,), (before,), (addition,) = usual.i[1], usual.w[1], apart.i[1], apart.w[1]
    assert addition == pytest.approx(moving_time(MACHINE.device, 6 * parameters, 2))
    assert before == pytest.approx(within + products)


def test_unfused_softmax_moves_sixteen_bytes_a_score_each_way():
    apart = replace(SETUP, fuses_kernels=False)
    fused, unfused = (layer_time(each, MACHINE, 0, LENGTH) for each in (SETUP, apart))
    scores = LENGTH**2 * SETUP.model.num_heads / 8
    forward, back = moving_time(MACHINE.device, 12 * scores, 2), moving_time(MACHINE.device, 10 * scores, 1)
    assert unfused.forward.attention - fused.forward.attention == pytest.approx(forward)
    assert unfused.input.attention - fused.input.attention == pytest.approx(back)


def test_one_sender_of_a_message_has_the_network_to_itself():
    whole = replace(SETUP, scatters_messages=False)
    (scattered,), (alone,) = (step_costs(setup, MACHINE).message_f[1] for setup in (SETUP, whole))
    size, network = 2 * LENGTH * SETUP.model.hidden_size, MACHINE.network
    assert scattered - alone == pytest.approx(size / network.bandwidth - size / network.message_bandwidth)


def test_a_gpt_keeps_34_bytes_a_token_and_hidden_unit():
    model = ModelShape(4, 1024, 4096, 16, 64, 32000)
    setup = PaperSetup(model, LENGTH, 1, dropout=True)
    kept = layer_activation(setup, 0, 0, 1) + layer_keys_values(setup, 0, 0, 1)
    # The paper stores no log-sum-exp, and the mask of the dropout within attention takes a byte a score.
    assert kept - 4 * model.num_heads == 34 * model.hidden_size


def test_unfused_activations_hold_seven_tensors():
    unfused = paper(WHOLE, fuses_kernels=False)
    assert backward_working(unfused, 0, 0, 65536) == (2 + 2 + 7 * 8) * UNIT
    assert loss_bytes(unfused, 65536) / loss_bytes(replace(WHOLE, keeps_logits=True), 65536) == 10 / 6


def test_what_is_freed_late_grows_with_the_layers_of_a_stage():
    late = paper(SHARED, frees_late=True)
    deep = replace(late, placement=Placement(4), layers_per_stage=())
    base = backward_working(SHARED, 0, 0, 65536)
    more, more_in_deep = (backward_working(setup, 0, 0, 65536) - base for setup in (late, deep))
    assert more_in_deep == pytest.approx(2 * more) and more > 0
    # Without sequence parallelism nothing is gathered.
    alone = paper(WHOLE, frees_late=True)
    assert backward_working(alone, 0, 0, 65536) == backward_working(WHOLE, 0, 0, 65536)


def test_weight_gradients_that_wait_hold_no_scores():
    setup = paper(WHOLE, sequence_length=2048, segments=(), family="zb-h1", flash_attention=False)
    apart, whole = (rank_memory(setup, build(family, setup.shape).ranks[7], 7) for family in ("zb-h1", "1f1b"))
    activation, kept = activation_tables(setup)
    # The last rank holds one unit, and with weight gradients apart those of seven more.
    more = apart.activations + apart.keys_values + apart.logits - whole.activations - whole.keys_values - whole.logits
    assert more == pytest.approx(7 * kept[7][0], rel=0.05) and kept[7][0] < 0.7 * activation[7][0]
