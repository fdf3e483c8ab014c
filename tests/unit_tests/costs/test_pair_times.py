"""A forward and a backward beside each other: each hides its exchange of experts behind the compute of the other."""

from dataclasses import replace
from itertools import chain

import pytest
from msgspec import structs

from megatron.seq1f1b.commands.gain_map import with_links
from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.layer_bytes import Use, moved_bytes, unit_bytes
from megatron.seq1f1b.costs.layer_times import layer_time
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.pair_times import BeyondLaunch, ExchangeRow, Exchanges, PairTimes, exchanges, pair_times
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.stage_times import stage_rows
from megatron.seq1f1b.costs.training_setup import Moves, TrainingSetup
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
    first = ExchangeRow(exchange_f=(0.0,), compute_f=(0.0,), exchange_b=(exchange_b,), compute_b=(5.0,))
    last = ExchangeRow(exchange_f=(exchange_f,), compute_f=(3.0,), exchange_b=(0.0,), compute_b=(0.0,))
    times = PairTimes(Exchanges([first, last]), [BeyondLaunch(forward=(9.0,), backward=(9.0,))] * 2)
    assert times.saved(parse_action("1F2"), parse_action("0B1")) == hidden_f + hidden_b
    assert times.saved(parse_action("0F2"), parse_action("1B1")) == 0
    assert times.exchanges.most_hidden == (((0.0,), (min(exchange_b, 3.0),)), ((hidden_f,), (0.0,)))
    assert times.exchanges.most_saved == hidden_f + min(exchange_b, 3.0)


def test_a_pair_takes_as_long_as_its_launches():
    """Short segments wait for the host, which launches a forward and a backward one after the other."""
    units = tuple(map(parse_action, ("0F1", "0B0")))
    long, short = (replace(MIXTURE, sequence_length=tokens, segments=(tokens,)) for tokens in (4096, 128))
    times = pair_times(long, MACHINE)
    assert times.saved(*units) == sum(chain.from_iterable(times.exchanges.most_hidden[0]))
    times = pair_times(short, replace(MACHINE, host=structs.replace(MACHINE.host, counts=0.0)))
    assert times.exchanges.most_saved > 0 and times.saved(*units) == pytest.approx(0, abs=1e-9)


def test_set_ups_share_exchanges_unless_experts_are_repeated():
    plain = exchanges(MIXTURE, MACHINE)
    for recompute in ("layernorm mlp", "layernorm moe_act"):
        assert exchanges(replace(MIXTURE, recompute=recompute), MACHINE) is plain
    again = exchanges(replace(MIXTURE, recompute="layernorm moe"), MACHINE)
    assert again.rows[0].exchange_b > plain.rows[0].exchange_b


# The share of an exchange that passes beside compute.
HIDDEN = 0.37


def test_products_and_attention_of_a_stage_hide():
    (row,) = exchanges(MIXTURE, MACHINE).rows
    layer = layer_time(MIXTURE, MACHINE, 0, 4096)
    waits = 8 * MACHINE.host.counts  # for the counts of tokens, while the other computes
    assert row.exchange_f[0] == pytest.approx(HIDDEN * 8 * layer.forward.dispatch + waits)
    assert row.exchange_b[0] == pytest.approx(HIDDEN * 8 * layer.input.dispatch) and layer.input.dispatch > 0
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
    waits = 8 * MACHINE.host.counts
    assert exchanges(in_pairs, MACHINE).rows[0].exchange_b[0] == pytest.approx(HIDDEN * 8 * 3 * there + waits)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_without_a_pipeline_all_but_one_unit_is_in_a_pair(microbatches):
    mixture = replace(MIXTURE, num_microbatches=microbatches)
    shown, hidden = (predict(replace(mixture, hides_experts=hides), MACHINE) for hides in (False, True))
    saved = shown.seconds - hidden.seconds
    ((forward, backward),) = exchanges(mixture, MACHINE).most_hidden
    assert saved == pytest.approx((microbatches - 1) * (forward[0] + backward[0]))


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_few_units_of_a_pipeline_are_in_pairs(microbatches):
    """A rank starts with forwards and ends with backwards, which nothing runs beside."""
    setup = replace(MIXTURE, num_microbatches=microbatches, placement=Placement(2, 2), layers_per_stage=(2,) * 4)
    shown, hidden = (predict(replace(setup, hides_experts=hides), MACHINE) for hides in (False, True))
    pairs = 2 * microbatches - 3  # of the last rank: of two chunks the first goes ahead by two units
    forward, backward = exchanges(setup, MACHINE).most_hidden[0]
    assert 0 < shown.seconds - hidden.seconds <= pairs * (forward[0] + backward[0]) * (1 + 1e-9)
    assert least_seconds(replace(setup, hides_experts=True), MACHINE) <= hidden.seconds


def test_segments_in_pairs_save_time_and_hold_half_a_layer_more():
    """On one rank all forwards but those of the first sequence are in pairs."""
    setup = replace(MIXTURE, num_microbatches=2, segments=(2048, 2048), keeps_logits=False)
    shown, hidden = (predict(replace(setup, hides_experts=hides), MACHINE) for hides in (False, True))
    times = pair_times(setup, MACHINE)
    order = (("0F1.0", "0B0.1"), ("0F1.1", "0B0.0"))
    saved = sum(times.saved(parse_action(forward), parse_action(backward)) for forward, backward in order)
    assert shown.seconds - hidden.seconds == pytest.approx(saved)
    of_layer = float(unit_bytes(setup.layer_setup, setup.stages[0])[0, Use.ACTIVATIONS]) / 8
    more = hidden.memory[0].activations - shown.memory[0].activations
    assert more == pytest.approx(of_layer / 2, rel=0.1)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipeline_of_pairs_holds_what_it_starts_ahead(chunks):
    """By a hop more for each rank behind with one chunk, by a unit with two; half a layer of it is that of the pair."""
    layers = {"layers_per_stage": (2,) * 4} if chunks == 2 else {"layers_per_stage": (4,) * 2}
    setup = replace(MIXTURE, num_microbatches=8, placement=Placement(2, chunks), **layers)
    shown, hidden = (predict(replace(setup, hides_experts=hides), MACHINE) for hides in (False, True))
    depth = setup.layers_per_stage[0]
    of_layer = float(unit_bytes(setup.layer_setup, setup.stages[0])[0, Use.ACTIVATIONS]) / depth
    units_ahead = 2 if chunks == 1 else 1
    # Its backward frees the last of these units, but for half a layer, while the forward fills one.
    more = (units_ahead - 1) * depth * of_layer + of_layer / 2
    assert hidden.memory[0].activations - shown.memory[0].activations == pytest.approx(more, rel=0.1)


def test_megatron_waits_for_the_copies_of_forwards_before():
    """Parts of units leave in the order of forwards. Where their copies take longer than these, the forwards ahead of
    the first backward wait; beside backwards there is time enough."""
    setup = replace(
        MIXTURE,
        num_microbatches=8,
        placement=Placement(4),
        layers_per_stage=(2,) * 4,
        offloads=1.0,
        moves=Moves.MODULES,
    )
    (fast, slow) = (predict(setup, with_links(MACHINE, 360e9, bandwidth)) for bandwidth in (400e9, 20e9))
    copy = moved_bytes(setup)[0][0] / 20e9
    forward = stage_rows(setup, fast.machine)[0][0][0]
    assert copy > forward
    assert slow.pipeline - fast.pipeline > 2 * (copy - forward)
    assert slow.memory == fast.memory
