"""Time and memory of a loss whose logits are computed in pieces, and again in the backward."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.model import loss_pieces
from megatron.seq1f1b.planning.costs.layer_bytes import MOST_KEPT, PIECE, keeps_logits
from megatron.seq1f1b.planning.costs.layer_times import head_time
from megatron.seq1f1b.planning.costs.machine import GIB, read_machine
from megatron.seq1f1b.planning.costs.stage_costs import A100, analytic_costs
from megatron.seq1f1b.planning.costs.step_memory import rank_memory
from megatron.seq1f1b.planning.costs.training_setup import TrainingSetup
from megatron.seq1f1b.schedule import Placement, build

MODEL = preset("llama3-70b")


def setup(length: int, segments: int, family: str = "1f1b") -> TrainingSetup:
    return TrainingSetup(
        MODEL,
        length,
        2,
        tensor_parallel=8,
        sequence_parallel=True,
        placement=Placement(4),
        family=family,
        segments=(length // segments,) * segments,
        recompute="full",
    )


def test_pieces_are_those_of_the_model():
    assert (PIECE, MOST_KEPT) == (loss_pieces.PIECE, loss_pieces.WORTH * loss_pieces.PIECE)


def test_few_logits_are_kept():
    assert keeps_logits(setup(32768, 4)) and not keeps_logits(setup(65536, 4))


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_a_million_tokens_keep_hidden_states_in_place_of_logits(family):
    one = setup(2**20, 64, family)
    in_pieces, kept = (
        rank_memory(each, build(family, each.shape).ranks[3], 3).logits
        for each in (one, replace(one, keeps_logits=True))
    )
    hidden = 2 * 2 * 2**20 * MODEL.hidden_size / 8  # before and after the last norm
    assert in_pieces - hidden < GIB and kept > 60 * GIB


def test_sequences_are_cut_by_the_repeated_product():
    layers = (MODEL.num_layers // 4,) * 4
    kept, in_pieces = (analytic_costs(MODEL, layers, A100, loss_in_pieces=pieces) for pieces in (False, True))
    assert in_pieces[:3] == kept[:3]
    product = kept[3].forward.per_token - kept[2].forward.per_token
    assert in_pieces[3].backward.per_token - kept[3].backward.per_token == pytest.approx(product)
    assert in_pieces[3].weight == in_pieces[2].weight != kept[3].weight


def test_the_backward_repeats_the_forward_and_w_has_nothing():
    machine, one = read_machine("h100-80gb"), setup(2**20, 64)
    kept = head_time(replace(one, keeps_logits=True), machine, 0, 2**14)
    in_pieces = head_time(one, machine, 0, 2**14)
    assert in_pieces.forward == kept.forward and in_pieces.weight == 0.0
    assert kept.weight < in_pieces.input - kept.input - kept.weight <= kept.forward
