"""Units that move layer by layer: what of them is on the device."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.layer_bytes import moved_bytes
from megatron.seq1f1b.costs.step_memory import host_bytes, rank_memory
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.costs.units_by_layer import UnitsByLayer
from megatron.seq1f1b.schedule import Placement, build, units_to_move, with_moves

LAYERS = 8  # of a stage


@pytest.fixture
def setup():
    model = replace(preset("2.7b"), num_layers=2 * LAYERS)
    return TrainingSetup(model, 4096, 6, placement=Placement(2), offloads=1.0, layers_leaving=2)


def layers_here(setup, paired=frozenset()):
    """Of the units on their way, at each action of the first rank."""
    order = build("gpipe", setup.shape).ranks[0]
    away = units_to_move(order, 1.0, by_layer=True)
    assert len(away) == 6
    of_layer = moved_bytes(setup)[0][0] / LAYERS
    found = UnitsByLayer(order, away, paired, setup.layers_leaving).bytes_on_their_way(setup)
    return [round(each / of_layer, 9) for each in found]


def test_few_layers_are_here_at_once(setup):
    """Two leave beside the one at work. Two go backward or come back, and one is back ahead of the next backward. Of
    the last forward so many are left that one leaves beside each that comes back."""
    assert layers_here(setup) == [3] * 5 + [4] + [3] * 5 + [2]
    assert layers_here(setup.but(layers_leaving=3)) == [4] * 5 + [5] + [4] + [3] * 4 + [2]


def test_the_device_holds_less_and_the_host_as_much(setup):
    plain = build("gpipe", setup.shape).ranks[0]
    whole = setup.but(layers_leaving=0)
    of_units = with_moves(plain, units_to_move(plain, 1.0))
    by_layer = with_moves(plain, units_to_move(plain, 1.0, by_layer=True), by_layer=True)
    unit = moved_bytes(setup)[0][0]
    less = rank_memory(whole, of_units, 0).total - rank_memory(setup, by_layer, 0).total
    assert less > unit
    assert host_bytes(setup, by_layer) == (6 - 1 / LAYERS) * unit  # one layer comes back beside the last forward
    assert host_bytes(whole, of_units) == 4 * unit  # two have the shortest way back, and stay
