"""What an action holds while it runs, the moment at which a rank holds most, and a loss whose logits are computed in
pieces, and again in the backward."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.layer_bytes import MOST_KEPT, PIECE, backward_working, keeps_logits, unit_bytes
from megatron.seq1f1b.costs.layer_times import head_time
from megatron.seq1f1b.costs.machine import GIB, read_machine
from megatron.seq1f1b.costs.stage_costs import A100, analytic_costs
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.costs.training_setup import ALL_BUT_ATTENTION, TrainingSetup
from megatron.seq1f1b.model.memory import loss_pieces
from megatron.seq1f1b.schedule import Holds, Placement, build

LENGTH = 65536
WHOLE = TrainingSetup(preset("30b"), LENGTH, 8, placement=Placement(8), keeps_logits=True)
SHARED = replace(WHOLE, tensor_parallel=8, sequence_parallel=True)
UNIT = LENGTH * WHOLE.model.hidden_size  # a byte for each token and hidden unit


def test_tensor_parallel_ranks_share_all_but_inputs_of_products():
    # The gradients of the residual stream and of what the activation function returned.
    assert backward_working(WHOLE, WHOLE.stages[0], 0, LENGTH) == (2 + 8) * UNIT
    without = replace(SHARED, sequence_parallel=False)
    assert backward_working(without, without.stages[0], 0, LENGTH) == (2 + 8 / 8) * UNIT
    # With sequence parallelism the input is gathered, and its gradient scattered, once the activation's input is gone.
    assert backward_working(SHARED, SHARED.stages[0], 0, LENGTH) == (2 / 8 + 2 + 2 + 2 / 8 - 8 / 8) * UNIT


def test_30b_on_64_gpus_holds_what_its_rehearsal_counts():
    """The table of docs/rehearsal.md without what lies outside the allocator."""
    setup = replace(SHARED, segments=(25344, 16256, 12928, 11008), distributed_optimizer=True)
    schedule = build("1f1b", setup.shape)
    memory = [rank_memory(setup, schedule.ranks[rank], rank) for rank in range(8)]
    counted = [48.6, 45.57, 40.76, 38.65, 36.18, 33.56, 28.74, 28.49]
    assert [(each.total - each.reserved) / GIB for each in memory] == pytest.approx(counted, rel=0.01)
    assert [each.keys_values / GIB for each in memory] == pytest.approx([8.5, 8.5, 7, 7, 7, 7, 5.5, 5.5], rel=0.001)


def test_weight_gradients_need_32_bytes_a_token_and_hidden_unit():
    of_stage = 8 * 32 * WHOLE.model.hidden_size
    assert unit_bytes(WHOLE, WHOLE.stages[1], Holds.FOR_WEIGHTS).sum() == of_stage * LENGTH
    # Of the logits, gradients in 16 bit; and what they were computed from.
    of_logits = 2 * (WHOLE.model.vocab_size + WHOLE.model.hidden_size)
    assert unit_bytes(WHOLE, WHOLE.stages[7], Holds.FOR_WEIGHTS).sum() == (of_stage + of_logits) * LENGTH


def test_weight_gradients_apart_hold_what_a_rehearsal_counts():
    """16 layers of 4096 on 8 GPUs with sequence parallelism, where output gradients of blocks are whole: activations of
    both pipeline ranks, and all, in GiB."""
    sizes = {"tensor_parallel": 4, "placement": Placement(2), "segments": (8192,) * 4, "family": "zb-h1"}
    flags = dict.fromkeys(("sequence_parallel", "distributed_optimizer", "keeps_logits"), True)
    setup = TrainingSetup(replace(preset("7b"), num_layers=16), 32768, 4, **sizes, **flags)
    schedule = build("zb-h1", setup.shape)
    memory = [rank_memory(setup, schedule.ranks[rank], rank) for rank in (0, 1)]
    assert [each.activations / GIB for each in memory] == pytest.approx([10.03, 11.05], rel=0.03)
    assert [(each.total - each.reserved) / GIB for each in memory] == pytest.approx([21.32, 23.39], rel=0.04)


def test_recomputation_holds_one_layer_more():
    """Its inputs, and what it keeps, keys and values included unless they have a cache, or attention is kept."""
    of_attention = 4 / 8 + 4 * 64 / 8 / WHOLE.model.hidden_size
    for recompute, segments, less in (("full", 1, 0), ("full", 4, 4 / 8), (ALL_BUT_ATTENTION, 1, of_attention - 2 / 8)):
        again = replace(SHARED, recompute=recompute, segments=(LENGTH // segments,) * segments)
        working, plain = (backward_working(each, each.stages[0], 0, LENGTH) for each in (again, SHARED))
        stays = 4 * 2 / 8 + 16 / 8 + 4 / 8 + of_attention
        assert working - plain == pytest.approx((stays - less) * UNIT)


LLAMA = preset("llama3-70b")


def in_pieces(length: int, segments: int, family: str = "1f1b") -> TrainingSetup:
    sizes = {"tensor_parallel": 8, "placement": Placement(4), "segments": (length // segments,) * segments}
    return TrainingSetup(LLAMA, length, 2, sequence_parallel=True, family=family, recompute="full", **sizes)


def test_pieces_are_those_of_the_model_and_few_logits_are_kept():
    assert (PIECE, MOST_KEPT) == (loss_pieces.PIECE, loss_pieces.MOST_PIECES_KEPT * loss_pieces.PIECE)
    assert keeps_logits(in_pieces(32768, 4)) and not keeps_logits(in_pieces(65536, 4))


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_a_million_tokens_keep_hidden_states_in_place_of_logits(family):
    one = in_pieces(2**20, 64, family)
    pieces, whole = (
        rank_memory(each, build(family, each.shape).ranks[3], 3).logits
        for each in (one, replace(one, keeps_logits=True))
    )
    hidden = 2 * 2 * 2**20 * LLAMA.hidden_size / 8  # before and after the last norm
    assert pieces - hidden < GIB and whole > 60 * GIB


def test_sequences_are_cut_by_the_repeated_product():
    layers = (LLAMA.num_layers // 4,) * 4
    whole, pieces = (analytic_costs(LLAMA, layers, A100, loss_in_pieces=each) for each in (False, True))
    assert pieces[:3] == whole[:3]
    product = whole[3].forward.per_token - whole[2].forward.per_token
    assert pieces[3].backward.per_token - whole[3].backward.per_token == pytest.approx(product)
    assert pieces[3].weight == pieces[2].weight != whole[3].weight


def test_the_backward_repeats_the_forward_and_w_has_nothing():
    machine, one = read_machine("h100-80gb"), in_pieces(2**20, 64)
    forward, back, weight = head_time(replace(one, keeps_logits=True), machine, 0, 2**14)
    again, longer, no_weight = head_time(one, machine, 0, 2**14)
    assert again == forward and no_weight == 0.0
    assert weight < longer - back - weight <= forward
