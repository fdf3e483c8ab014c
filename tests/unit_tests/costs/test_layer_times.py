"""What context-parallel ranks exchange and attention hides; what mixtures of experts take."""

from dataclasses import replace
from itertools import combinations
from statistics import mean

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from megatron.seq1f1b.commands.model_flags import PRESETS, preset
from megatron.seq1f1b.costs.blocks import parameters_of_model
from megatron.seq1f1b.costs.context_exchange import BothPasses, comm_types, context_exchange
from megatron.seq1f1b.costs.layer_bytes import layer_activation, layer_kept_for_weights, layer_moved
from megatron.seq1f1b.costs.layer_times import (
    fastest_cp_comm_type,
    head_time,
    layer_time,
    repeated_time,
)
from megatron.seq1f1b.costs.machine import Machine, read_machine
from megatron.seq1f1b.costs.model_shape import Experts, ModelShape
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.stage_costs import analytic_costs
from megatron.seq1f1b.costs.stage_times import (
    first_passes,
    launch_times,
    rows_of_stage,
    sums_of_stage,
    waits_for_launches,
)
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.costs.training_setup import Fsdp, Moves, TrainingSetup
from megatron.seq1f1b.schedule import Placement, build

MACHINE = read_machine("h100-80gb")
LENGTH, HEADS, KV_HEADS, DIM = 65536, 64, 8, 128
SETUP = TrainingSetup(preset("llama3-70b"), LENGTH, 1, tensor_parallel=2, context_parallel=4, sequence_parallel=True)
# Bytes of the tokens of a rank.
KEYS_VALUES, QUERIES = (2 * LENGTH / 4 * heads / 2 * DIM for heads in (2 * KV_HEADS, HEADS))


def exchange(way: str, attention: tuple[float, float], **changes) -> tuple[float, float]:
    setup = replace(SETUP, cp_comm_type=way, **changes)
    return context_exchange(setup, MACHINE, setup.blocks(0)[0], LENGTH, BothPasses(*attention))


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


@pytest.mark.parametrize("dispatches_once", [False, True])
def test_a_forward_waits_for_the_counts_of_tokens(dispatches_once):
    """Every dispatcher brings them to the host (transformer/moe/token_dispatcher.py); a backward knows them."""
    setup = TrainingSetup(
        preset("deepseek-v3"), 4096, 8, expert_parallel=64, data_parallel=64, dispatches_once=dispatches_once
    )
    counts = MACHINE.host.counts
    at_once = replace(MACHINE, host=structs.replace(MACHINE.host, counts=0.0))
    free, waiting = (layer_time(setup, machine, 0, 4096, 5) for machine in (at_once, MACHINE))
    assert waiting.forward.other - free.forward.other == pytest.approx(counts) and counts > 0
    assert waiting.input == free.input
    assert layer_time(setup, at_once, 0, 4096, 0) == layer_time(setup, MACHINE, 0, 4096, 0)  # a layer without experts
    again = replace(setup, recompute="moe")
    free_again, waiting_again = (repeated_time(again, machine, 0, 4096, 5) for machine in (at_once, MACHINE))
    assert waiting_again - free_again == pytest.approx(counts)


def test_the_device_hides_launches_of_experts():
    """A stage takes as long as its host or its device, whichever takes longer."""
    for tokens in (256, 16384):
        setup = TrainingSetup(preset("qwen3-30b-a3b"), tokens, 8, expert_parallel=8, data_parallel=8)
        (stage,) = setup.stages
        at_once = replace(MACHINE, host=structs.replace(MACHINE.host, expert=0.0))
        more = [
            with_launches - without
            for with_launches, without in zip(
                launch_times(setup, MACHINE, stage), launch_times(setup, at_once, stage), strict=True
            )
        ]
        launches = 48 * 128 / 8 * MACHINE.host.expert
        assert more == pytest.approx([launches, 2 * launches])
        again = replace(setup, recompute="moe")
        assert launch_times(again, MACHINE, stage)[1] == pytest.approx(
            launch_times(setup, MACHINE, stage)[1] + launches
        )
        f, _, _ = rows_of_stage(setup.layer_setup, MACHINE, stage)
        free, _, _ = rows_of_stage(setup.layer_setup, at_once, stage)
        if tokens == 256:
            assert f[0] == pytest.approx(launch_times(setup, MACHINE, stage)[0] + MACHINE.host.action)
        else:
            assert f == free


@pytest.mark.parametrize("segments", [(16384,), (8192, 4096, 4096)])
def test_sums_of_stages_are_those_of_their_segments(segments):
    """Here one of device, host, copies and collectives takes longest in all segments."""
    setup = TrainingSetup(preset("qwen3-30b-a3b"), 16384, 8, expert_parallel=8, data_parallel=8, segments=segments)
    placement = Placement(3)
    at_once = replace(MACHINE, host=structs.replace(MACHINE.host, layer_forward=0.0, layer_backward=0.0, expert=0.0))
    slow_host = replace(MACHINE, host=structs.replace(MACHINE.host, layer_forward=1.0, layer_backward=1.0))
    slow_copies = replace(MACHINE, device=structs.replace(MACHINE.device, host_bandwidth=1e8))
    slow_links = replace(MACHINE, node=structs.replace(MACHINE.node, bandwidth=1e6))  # replicas are in one node
    for of_machine, machine in (
        (setup, at_once),
        (setup, slow_host),
        (setup.but(offloads=0.5, moves=Moves.MODULES), slow_copies),
        (setup.but(expert_parallel=1, fsdp=Fsdp.PARAMETERS), slow_links),
    ):
        for stage in of_machine.but(placement=placement, layers_per_stage=(15, 17, 16)).stages:
            f, i, w = rows_of_stage(of_machine.layer_setup, machine, stage)
            forward, backward = sums_of_stage(of_machine.layer_setup, machine, stage)
            assert max(forward) == pytest.approx(sum(f))
            assert max(backward) == pytest.approx(sum(i) + sum(w))
            assert first_passes(of_machine.layer_setup, machine, stage) == pytest.approx((f[0], i[0] + w[0]))


def test_graphs_leave_the_launches_of_experts_to_the_host():
    short = TrainingSetup(preset("qwen3-30b-a3b"), 256, 8, expert_parallel=8, data_parallel=8)
    (stage,) = short.stages
    experts = 48 * 128 / 8 * MACHINE.host.expert
    replayed = short.but(replays_layers=True)
    assert launch_times(replayed, MACHINE, stage) == pytest.approx((experts, 2 * experts))
    dense = TrainingSetup(preset("llama3-8b"), 256, 8, replays_layers=True)
    assert launch_times(dense, MACHINE, dense.stages[0]) == (0.0, 0.0)
    for tokens in (256, 65536):
        setup = short.but(sequence_length=tokens, segments=(tokens,))
        waits = waits_for_launches(setup.layer_setup, MACHINE)
        assert waits == (tokens == 256)
        f, _, _ = rows_of_stage(setup.layer_setup, MACHINE, stage)
        of_graphs, _, _ = rows_of_stage(setup.but(replays_layers=True).layer_setup, MACHINE, stage)
        assert of_graphs < f if waits else of_graphs == f


def test_biases_of_experts_are_launches():
    """Two more for each expert in the forward, ten in the backward, with the sums of their gradients."""
    biased = TrainingSetup(preset("gpt-oss-120b"), 4096, 1, expert_parallel=8)
    plain = replace(biased, model=replace(biased.model, has_biases=False))
    (stage,) = biased.stages
    of_both = (launch_times(setup, MACHINE, stage) for setup in (biased, plain))
    more = [with_biases - without for with_biases, without in zip(*of_both, strict=True)]
    launches = 36 * 128 / 8 * MACHINE.host.expert
    assert more == pytest.approx([2 / 16 * launches, 10 / 32 * 2 * launches])


def dispatched(setup: TrainingSetup) -> list[float]:
    """Seconds of the exchange of experts: to all of them, and once to each rank or node."""
    setups = [replace(setup, dispatches_once=once) for once in (False, True)]
    return [layer_time(each, MACHINE, 0, 4096, 5).forward.dispatch for each in setups]


DEVICE = structs.replace(MACHINE.device, single_numbers=2e11)
SLOW, FAST = (replace(MACHINE, device=structs.replace(DEVICE, single_numbers=rate)) for rate in (2e11, 0.0))


def more_with(model: ModelShape, machine: Machine = SLOW, **without: bool) -> list[float]:
    """Seconds of other kernels, forward and backward, that a model has more than one without what is named."""
    setup = TrainingSetup(model, 4096, 1, expert_parallel=8)
    times = [layer_time(replace(setup, model=one), machine, 0, 4096) for one in (model, replace(model, **without))]
    with_them, plain = ([time.forward.other, time.input.other] for time in times)
    return [one - other for one, other in zip(with_them, plain, strict=True)]


@pytest.mark.parametrize(
    "routes_in_32_bit, single, moved, kernels",
    [(False, (1, 2), (10, 4), (2, 4)), (True, (2, 2), (14, 20), (2, 6))],
    ids=["16 bit", "32 bit"],
)
def test_biases_of_experts_are_added_one_by_one(routes_in_32_bit, single, moved, kernels):
    """Their products with probabilities of 16 or 32 bit read number by number, sums and casts do not."""
    model = replace(preset("gpt-oss-120b"), routes_in_32_bit=routes_in_32_bit)
    outputs = 4096 * 4 * 2880
    expected = [
        numbers * outputs / 2e11 + DEVICE.moving_time(others * outputs, launches * 16)
        for numbers, others, launches in zip(single, moved, kernels, strict=True)
    ]
    expected[1] += DEVICE.moving_time(2 * 2 * outputs, 16)  # of the first products, twice as wide
    assert more_with(model, has_biases=False) == pytest.approx(expected)


def test_a_flex_dispatcher_has_probabilities_in_32_bit():
    once = TrainingSetup(preset("gpt-oss-120b"), 4096, 1, expert_parallel=8, dispatches_once=True)
    assert once.routes_in_32_bit
    assert not replace(once, dispatches_once=False).routes_in_32_bit
    assert replace(once, model=replace(once.model, routes_in_32_bit=True), dispatches_once=False).routes_in_32_bit


def test_clamped_activations_are_kernels_of_their_own():
    """Both halves are cut, and joined again; once more where activation functions are computed again."""
    model = preset("gpt-oss-120b")
    numbers = 4096 * 4 * 2 * 2880
    forward = numbers / 2e11 + DEVICE.moving_time(4 * numbers, 3)
    backward = 2.5 * numbers / 2e11 + DEVICE.moving_time(5.5 * numbers, 7)
    assert more_with(model, clamps_activations=False) == pytest.approx([forward, backward])
    of_bytes = [DEVICE.moving_time(8 * numbers, 3), DEVICE.moving_time(15 * numbers, 7)]
    assert more_with(model, FAST, clamps_activations=False) == pytest.approx(of_bytes)
    setups = [
        TrainingSetup(replace(model, clamps_activations=clamps), 4096, 1, expert_parallel=8, recompute="moe_act")
        for clamps in (True, False)
    ]
    again = [repeated_time(setup, SLOW, 0, 4096, 0) for setup in setups]
    assert again[0] - again[1] == pytest.approx(forward)


def test_attention_in_a_window_computes_whole_blocks():
    """On H200, 256 heads of 4,096 tokens with windows of 128 keys take 0.264 and 0.917 ms with cuDNN."""
    h200 = read_machine("h200-141gb")
    setup = TrainingSetup(preset("gpt-oss-120b"), 4096, 1, micro_batch_size=4)
    windowed, whole = [layer_time(setup, h200, 0, 4096, layer=layer) for layer in (0, 1)]
    assert [windowed.forward.attention, windowed.input.attention] == pytest.approx([0.264e-3, 0.917e-3], rel=0.45)
    pairs = 128 * 129 / 2 + (4096 - 128) * 128  # of a token with itself and the 127 before it
    ratio = 3 * pairs / (4096 * 4097 / 2)
    assert windowed.forward.attention / whole.forward.attention == pytest.approx(ratio, rel=0.05)
    short = TrainingSetup(preset("gpt-oss-120b"), 128, 1)
    assert layer_time(short, h200, 0, 128, layer=0) == layer_time(short, h200, 0, 128, layer=1)


def test_products_of_8_bits_have_casts_and_experts_padding():
    device = structs.replace(MACHINE.device, cast_bytes=4, padding_bytes=8)
    setup = TrainingSetup(preset("mixtral-8x22b"), 4096, 1, expert_parallel=8)
    dense = replace(setup, model=replace(setup.model, experts=None, expert_layers=()))
    hidden = 6144
    width = 16384  # of an expert
    attention_in = hidden + hidden  # queries, keys and values; the projection behind
    attention_out = hidden + 2 * 1024 + hidden
    for each, tokens, padded in ((dense, 4096, 0), (setup, 2 * 4096, 2 * 4096 * hidden)):
        without, with_casts = (
            layer_time(each, machine, 0, 4096) for machine in (MACHINE, replace(MACHINE, device=device))
        )
        in_forward = 4 * (4096 * attention_in + tokens * (hidden + width)) + 8 * padded
        in_backward = 4 * (4096 * attention_out + tokens * (2 * width + hidden)) + 8 * padded
        kernels = 4 + 2 * (padded > 0)
        more = [getattr(with_casts, name).other - getattr(without, name).other for name in ("forward", "input")]
        assert more == pytest.approx([device.moving_time(moved, kernels) for moved in (in_forward, in_backward)])


def test_a_fused_loss_moves_a_sixth_of_the_bytes():
    setup = TrainingSetup(preset("llama3-8b"), 4096, 1, keeps_logits=True)
    logits = 4096 * 128256
    plain, fused = (head_time(each, MACHINE, 0, 4096) for each in (setup, replace(setup, fuses_loss=True)))
    spared = [MACHINE.device.moving_time((40 - 6) * logits, 7), MACHINE.device.moving_time((16 - 4) * logits, 3), 0]
    assert [a - b for a, b in zip(plain, fused, strict=True)] == pytest.approx(spared)


def test_a_gated_delta_rule_takes_as_long_as_published():
    """0.472 and 1.444 ms for 8,192 tokens and 32 heads on an H200."""
    setup = TrainingSetup(preset("qwen3-next-80b"), 8192, 1)
    forward = back = 0.0
    for product in setup.blocks(0)[0].products:
        forward += MACHINE.device.matmul_time(8192, product.outputs, product.inputs)
        back += MACHINE.device.matmul_time(8192, product.inputs, product.outputs)
    layer = layer_time(setup, MACHINE, 0, 8192)
    of_rule = [layer.forward.matmul - forward, layer.input.matmul - back]
    assert of_rule == pytest.approx([0.472e-3, 1.444e-3], rel=0.02)


def test_up_projections_and_shared_experts_are_computed_again():
    setup = TrainingSetup(preset("deepseek-v3"), 4096, 1, expert_parallel=64)
    attention, experts = setup.blocks(3)
    device = MACHINE.device
    for module, products, moved, kernels in (
        ("mla_up_proj", (attention.products[1], attention.products[3]), attention.moved, 5),
        ("shared_experts", experts.products, experts.moved, 2),
    ):
        expected = sum(device.matmul_time(4096, each.outputs, each.inputs) for each in products)
        expected += device.moving_time(2 * 4096 * moved, kernels)
        assert repeated_time(replace(setup, recompute=module), MACHINE, 0, 4096, 3) == pytest.approx(expected)
    assert (attention.products[1].inputs, attention.products[3].inputs) == (1536, 512)


def test_a_token_may_go_once_to_a_node():
    """DeepSeek-V3 on 8 nodes, one group of experts each: 3.6 of them have the experts of a token, which are 8."""
    setup = TrainingSetup(preset("deepseek-v3"), 4096, 8, expert_parallel=64, data_parallel=64)
    to_all, once = dispatched(setup)
    size = 2 * 4096 * 7168
    sent = size * 7 / 8 / 45e9  # to other nodes, 45 GB/s a device
    spread = size * 7 / 8 / 360e9  # and then in them
    experts = setup.model.experts
    assert to_all == pytest.approx(2 * (8 * sent + 3 * 20e-6))
    assert once == pytest.approx(2 * (experts.reached(8) * sent + experts.reached(64) * spread + 3 * 20e-6))
    inside = replace(setup, expert_parallel=8)
    to_all, once = (
        layer_time(replace(inside, dispatches_once=once), MACHINE, 0, 4096, 5).forward.dispatch
        for once in (False, True)
    )
    assert 0.4 < once / to_all < 0.5  # 3.6 ranks, each a group, for 8 experts


@given(
    st.integers(0, 3).flatmap(lambda n: st.tuples(st.just(2**n), st.integers(1, 2**n))),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_parts_of_the_experts_that_a_token_reaches(groups, active, log_parts):
    """By counting all choices of 16 experts, in groups."""
    number, chosen = groups
    parts = 2**log_parts
    size = 16 // number
    choices = [
        {*experts}
        for these in combinations(range(number), chosen)
        for experts in combinations([group * size + each for group in these for each in range(size)], active)
    ]
    assume(choices)
    reached = [len({expert * parts // 16 for expert in experts}) for experts in choices]
    found = Experts(16, active, 64, groups=number, active_groups=chosen).reached(parts)
    # Parts smaller than an expert all have it.
    assert found == pytest.approx(mean(reached) * max(1, parts // 16))


def test_tensor_parallelism_hides_behind_products_at_most():
    setup = replace(SETUP, tensor_parallel=8, sequence_parallel=True, recompute="mlp")
    slow = replace(MACHINE, node=structs.replace(MACHINE.node, bandwidth=MACHINE.node.bandwidth / 100))
    for machine, all_hidden in ((MACHINE, True), (slow, False)):
        shown, hidden = (
            layer_time(replace(setup, hides_tensor_exchange=hides), machine, 0, 4096) for hides in (False, True)
        )
        assert 0 <= hidden.forward.exchange < shown.forward.exchange
        assert 0 <= hidden.input.exchange < shown.input.exchange
        assert (hidden.forward.exchange == hidden.input.exchange == 0) == all_hidden
        assert hidden.forward._replace(exchange=0) == shown.forward._replace(exchange=0)


SIZES = {"expert_parallel": 8, "data_parallel": 8, "placement": Placement(4), "distributed_optimizer": True}
MIXTRAL = TrainingSetup(preset("mixtral-8x7b"), 8192, 4, **SIZES)


BILLIONS = {
    **{"2.7b": 2.69, "7b": 6.71, "13b": 12.92, "30b": 29.4, "gpt3-175b": 175, "gpt-1t": 1008, "llama3-8b": 8.03},
    **{"llama3-70b": 70.6, "llama3-405b": 405.9, "mixtral-8x7b": 46.7, "mixtral-8x22b": 141, "qwen3-30b-a3b": 30.5},
    **{"qwen3-235b-a22b": 235, "deepseek-v3": 671, "qwen3-next-80b": 80, "gpt-oss-120b": 117},
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes_and_costs(name):
    setup = TrainingSetup(preset(name), 8192, 1, segments=(4096, 4096))
    parameters = parameters_of_model(setup.model)
    assert parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert predict(setup, MACHINE).memory[0].total > parameters


def test_one_expert_for_all_tokens_is_a_feed_forward_block():
    """A single expert that every token goes through computes what a dense layer does, and leaves as much to W."""
    dense = replace(MIXTRAL.model, experts=None, expert_layers=())
    one_expert = replace(MIXTRAL.model, experts=Experts(1, 1, MIXTRAL.model.ffn_hidden_size))
    setups = [replace(MIXTRAL, model=model, expert_parallel=1) for model in (dense, one_expert)]
    times = [layer_time(setup, MACHINE, 0, 8192) for setup in setups]
    assert times[1].forward.matmul == pytest.approx(times[0].forward.matmul, rel=0.01)
    assert times[1].weight == pytest.approx(times[0].weight, rel=0.01)
    kept = [layer_kept_for_weights(setup, 0, 0, 8192) for setup in setups]
    assert kept[1] == kept[0] < layer_activation(setups[1], 0, 0, 8192)
    planned = [analytic_costs(model, (32,), MACHINE.device)[0].weight(0, 8192) for model in (dense, one_expert)]
    assert planned[1] == pytest.approx(planned[0], rel=0.01)


def test_expert_parallelism_divides_the_experts_and_their_state():
    few, many = (replace(MIXTRAL, expert_parallel=size) for size in (1, 8))
    assert many.layer_parameters()[1] == few.layer_parameters()[1] / 8
    memory = [rank_memory(setup, build("1f1b", setup.shape).ranks[0], 0) for setup in (few, many)]
    assert memory[1].weights < memory[0].weights / 3
    # The optimizer state is sharded over all replicas of a weight: as much on every rank either way.
    assert memory[1].optimizer == pytest.approx(memory[0].optimizer)


def test_layers_without_experts_are_counted_as_such():
    model = replace(MIXTRAL.model, expert_layers=tuple(range(1, 32)))
    setup = replace(MIXTRAL, model=model)
    assert [stage.layers for stage in setup.stages] == [((0, 1), (1, 7)), ((1, 8),), ((1, 8),), ((1, 8),)]
    assert setup.parameters[0][1] == 7 / 8 * setup.parameters[1][1]


def test_experts_computed_again_cost_a_forward_of_theirs():
    """DeepSeek-V3, whose first three layers are dense; its experts are 8 of 256 and one that all tokens share."""
    none = TrainingSetup(preset("deepseek-v3"), 8192, 1, expert_parallel=8, data_parallel=8)
    setup, residual = replace(none, recompute="moe"), 2 * 8192 * none.model.hidden_size
    assert [repeated_time(each, MACHINE, 0, 8192, layer) for each, layer in ((none, 9), (setup, 0))] == [0, 0]
    assert layer_activation(setup, 0, 0, 8192) == layer_activation(none, 0, 0, 8192)
    experts_alone = replace(none.model, num_layers=1, pattern="E")
    of_experts, again = (replace(each, model=experts_alone, layers_per_stage=()) for each in (none, setup))
    assert layer_activation(again, 0, 0, 8192) == 2 * residual < 0.15 * layer_activation(of_experts, 0, 0, 8192)
    moving = replace(again, offloads=1.0, moves=Moves.MODULES)
    assert layer_moved(moving, 0, 0, 8192) == (residual, 0)
    forward = layer_time(of_experts, MACHINE, 0, 8192).forward.total
    assert repeated_time(again, MACHINE, 0, 8192, 0) == pytest.approx(forward, rel=0.05)
    assert repeated_time(setup, MACHINE, 0, 8192, 9) == repeated_time(again, MACHINE, 0, 8192, 0)
