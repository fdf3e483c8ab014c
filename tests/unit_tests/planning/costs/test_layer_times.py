"""What context-parallel ranks exchange, and what attention hides of it."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.planning.costs.layer_times import comm_types, context_exchange, fastest_cp_comm_type, layer_time
from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.costs.training_setup import TrainingSetup

MACHINE = read_machine("h100-80gb")
LENGTH, HEADS, KV_HEADS, DIM = 65536, 64, 8, 128
SETUP = TrainingSetup(preset("llama3-70b"), LENGTH, 1, tensor_parallel=2, context_parallel=4, sequence_parallel=True)
# Bytes of the tokens of a rank.
KEYS_VALUES, QUERIES = (2 * LENGTH / 4 * heads / 2 * DIM for heads in (2 * KV_HEADS, HEADS))


def exchange(way: str, attention: tuple[float, float], **changes) -> tuple[float, float]:
    setup = replace(SETUP, cp_comm_type=way, **changes)
    return context_exchange(setup, MACHINE, setup.blocks(0)[0], LENGTH, attention)


def test_attention_hides_a_ring_but_for_the_last_gradients():
    """Transformer Engine adds the result of each of 4 steps to what is there: two reads and a write."""
    hop, both = (MACHINE.message_time(0, 2, size, 2) for size in (KEYS_VALUES, 2 * KEYS_VALUES))
    added = [3 * 4 * size / (0.8 * 3350e9) + 8 * 4e-6 for size in (QUERIES, QUERIES + KEYS_VALUES)]
    hidden, bare = exchange("p2p", (1.0, 1.0)), exchange("p2p", (0.0, 0.0))
    assert hidden == pytest.approx((added[0], added[1] + hop))
    assert bare[0] - hidden[0] == pytest.approx(3 * hop) and bare[1] - hidden[1] == pytest.approx(hop + 2 * both)
    # Beside attention of one hop a step, gradients are half hidden.
    assert exchange("p2p", (4 * hop, 4 * hop))[1] - hidden[1] == pytest.approx(2 * (both - hop))


def test_a_ring_between_nodes_goes_at_the_pace_of_an_adapter():
    inside, outside = (exchange("p2p", (0.0, 0.0), tensor_parallel=size)[0] for size in (2, 8))
    hop = MACHINE.message_time(0, 8, KEYS_VALUES / 4, 8)
    assert outside - 3 * 4 * QUERIES / 4 / (0.8 * 3350e9) - 8 * 4e-6 == pytest.approx(3 * hop) and hop > 0
    assert outside < inside  # of a quarter of the bytes
    # Heads among neighbours shorten the ring.
    ring, both = (exchange(way, (0.0, 0.0), context_parallel=16) for way in ("p2p", "a2a+p2p 4 4"))
    assert sum(both) < sum(ring)


def test_gathering_and_exchanging_heads_are_not_hidden():
    gathered = MACHINE.all_gather_time(SETUP.context_group, 4 * KEYS_VALUES)
    assert exchange("all_gather", (1.0, 1.0)) == pytest.approx((gathered, 2 * gathered))
    by_heads = MACHINE.all_to_all_time(SETUP.context_group, 2 * QUERIES + KEYS_VALUES)
    assert exchange("a2a", (1.0, 1.0)) == pytest.approx((by_heads, by_heads))


def test_ways_are_those_of_transformer_engine():
    assert comm_types(SETUP, MACHINE) == ("all_gather", "a2a", "p2p")
    # Four heads of keys a rank; four ranks of a context-parallel group share a node.
    assert comm_types(replace(SETUP, context_parallel=8), MACHINE) == ("all_gather", "p2p", "a2a+p2p 4 2")
    # With more ranks than heads of keys each has one, which no other can share.
    few = replace(SETUP.model, num_kv_heads=2)
    assert comm_types(replace(SETUP, model=few, tensor_parallel=4), MACHINE) == ("all_gather", "p2p")
    window = replace(SETUP.model, window=1024, window_layers=(0,))
    assert comm_types(replace(SETUP, model=window), MACHINE) == ("all_gather", "a2a")


@pytest.mark.parametrize("tensor, length, kind", [(2, 4096, "all_gather"), (8, 1 << 20, "p2p")])
def test_whole_sequences_go_the_fastest_way(tensor, length, kind):
    setup = replace(SETUP, sequence_length=length, segments=(), tensor_parallel=tensor)
    assert fastest_cp_comm_type(setup, MACHINE) == kind
    free, named = (layer_time(replace(setup, cp_comm_type=way), MACHINE, 0, length) for way in (None, kind))
    assert free == named


def test_experts_that_hide_their_exchange_take_less():
    setup = TrainingSetup(preset("deepseek-v3"), 4096, 8, expert_parallel=64, data_parallel=64)
    shown, hidden = (layer_time(replace(setup, hides_experts=hides), MACHINE, 0, 4096, 5) for hides in (False, True))
    assert hidden.forward.all_to_all < shown.forward.all_to_all
    assert hidden.forward._replace(all_to_all=0) == shown.forward._replace(all_to_all=0)


def test_tensor_parallelism_hides_behind_products_at_most():
    setup = replace(SETUP, tensor_parallel=8, sequence_parallel=True, recompute="mlp")
    slow = replace(MACHINE, node=replace(MACHINE.node, bandwidth=MACHINE.node.bandwidth / 100))
    for machine, all_hidden in ((MACHINE, True), (slow, False)):
        shown, hidden = (
            layer_time(replace(setup, hides_tensor_exchange=hides), machine, 0, 4096) for hides in (False, True)
        )
        assert 0 <= hidden.forward.exchange < shown.forward.exchange
        assert 0 <= hidden.input.exchange < shown.input.exchange
        assert (hidden.forward.exchange == hidden.input.exchange == 0) == all_hidden
        assert hidden.forward._replace(exchange=0) == shown.forward._replace(exchange=0)
