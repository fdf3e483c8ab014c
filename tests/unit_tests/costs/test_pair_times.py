"""A forward and a backward beside each other: each hides its exchange of experts behind the compute of the other."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.layer_times import layer_time
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.pair_times import PairRow, PairTimes, pair_times
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.stage_times import stage_rows
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planner.bounds import least_seconds
from megatron.seq1f1b.schedule import Placement, parse_action

MACHINE = read_machine("h100-80gb")
MIXTURE = TrainingSetup(
    replace(preset("mixtral-8x7b"), num_layers=8),
    4096,
    1,
    expert_parallel=8,
    data_parallel=8,
    distributed_optimizer=True,
    keeps_logits=True,
)


@pytest.mark.parametrize("exchange_f, hidden_f", [(2.0, 2.0), (9.0, 5.0)])
@pytest.mark.parametrize("exchange_b, hidden_b", [(1.0, 1.0), (7.0, 3.0)])
def test_an_exchange_is_hidden_up_to_the_compute_of_the_other(exchange_f, hidden_f, exchange_b, hidden_b):
    first = PairRow(exchange_f=(0.0,), compute_f=(0.0,), exchange_b=(exchange_b,), compute_b=(5.0,))
    last = PairRow(exchange_f=(exchange_f,), compute_f=(3.0,), exchange_b=(0.0,), compute_b=(0.0,))
    times = PairTimes([first, last])
    assert times.saved(parse_action("1F2"), parse_action("0B1")) == hidden_f + hidden_b
    assert times.saved(parse_action("0F2"), parse_action("1B1")) == 0
    assert times.most_saved == hidden_f + hidden_b


def test_products_and_attention_of_a_stage_hide():
    (row,) = pair_times(MIXTURE, MACHINE).rows
    layer = layer_time(MIXTURE, MACHINE, 0, 4096)
    assert row.exchange_f[0] == pytest.approx(8 * layer.forward.dispatch) and layer.forward.dispatch > 0
    assert row.compute_f[0] == pytest.approx(8 * (layer.forward.matmul + layer.forward.attention))
    of_back = layer.input.matmul + layer.input.attention + layer.weight
    assert row.compute_b[0] == pytest.approx(8 * of_back)


def test_tokens_travel_once_more_to_repeated_experts():
    """Beside a forward; else they travel back, too, and nothing hides either."""
    again = replace(MIXTURE, recompute="moe")
    in_pairs = replace(again, hides_experts=True)
    there = layer_time(MIXTURE, MACHINE, 0, 4096).forward.dispatch / 2
    without, beside = (stage_rows(each, MACHINE)[0][1][0] for each in (again, in_pairs))
    assert without - beside == pytest.approx(8 * there)
    assert pair_times(in_pairs, MACHINE).rows[0].exchange_b[0] == pytest.approx(8 * 3 * there)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_without_a_pipeline_all_but_one_unit_is_in_a_pair(microbatches):
    alone = replace(MIXTURE, num_microbatches=microbatches)
    shown, hidden = (predict(replace(alone, hides_experts=hides), MACHINE) for hides in (False, True))
    saved = shown.seconds - hidden.seconds
    assert saved == pytest.approx((microbatches - 1) * pair_times(alone, MACHINE).most_saved)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_few_units_of_a_pipeline_are_in_pairs(microbatches):
    """A rank starts with forwards and ends with backwards, which nothing runs beside."""
    setup = replace(MIXTURE, num_microbatches=microbatches, placement=Placement(2, 2), layers_per_stage=(2,) * 4)
    shown, hidden = (predict(replace(setup, hides_experts=hides), MACHINE) for hides in (False, True))
    pairs = 2 * microbatches - 3  # of the last rank: of two chunks the first goes ahead by two units
    most = pairs * pair_times(setup, MACHINE).most_saved
    assert 0 < shown.seconds - hidden.seconds <= most * (1 + 1e-9)
    assert least_seconds(replace(setup, hides_experts=True), MACHINE) <= hidden.seconds


def test_segments_in_pairs_save_time_and_hold_more_units():
    """On one rank all forwards but those of the first sequence are in pairs."""
    setup = replace(MIXTURE, num_microbatches=2, segments=(2048, 2048), keeps_logits=False)
    shown, hidden = (predict(replace(setup, hides_experts=hides), MACHINE) for hides in (False, True))
    times = pair_times(setup, MACHINE)
    order = (("0F1.0", "0B0.1"), ("0F1.1", "0B0.0"))
    saved = sum(times.saved(parse_action(forward), parse_action(backward)) for forward, backward in order)
    assert shown.seconds - hidden.seconds == pytest.approx(saved)
    assert hidden.memory[0].activations > 1.3 * shown.memory[0].activations
