"""What layers of each kind keep, and the memory of models that have them."""

from dataclasses import replace

import pytest
from msgspec import structs

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.blocks import layer_parameters
from megatron.seq1f1b.costs.layer_bytes import (
    Phase,
    Use,
    changes_of,
    layer_activation,
    layer_keys_values,
    layer_keys_values_gradients,
    layer_state,
    moved_bytes,
    unit_bytes,
)
from megatron.seq1f1b.costs.layer_times import repeated_time
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.model_shape import DeltaNet, LatentAttention, Mamba, ModelShape
from megatron.seq1f1b.costs.stage_times import stage_rows
from megatron.seq1f1b.costs.step_memory import host_bytes, rank_memory
from megatron.seq1f1b.costs.training_setup import Moves, TrainingSetup
from megatron.seq1f1b.schedule import Kind, Placement, build

LENGTH = 16384
GPT = ModelShape(4, 1024, 4096, 16, 64, 32000, num_kv_heads=4, is_gated=True)
NET, MAMBA = DeltaNet(8, 16, 128, 64), Mamba(32, 64, 8, 128)
PLAIN = TrainingSetup(GPT, LENGTH, 4, tensor_parallel=2, sequence_parallel=True, segments=(LENGTH // 4,) * 4)


def hybrid(pattern: str, **changes) -> TrainingSetup:
    model = replace(GPT, num_layers=len(pattern), pattern=pattern, delta_net=NET, mamba=MAMBA)
    return replace(PLAIN, model=model, layers_per_stage=(), **changes)


@pytest.mark.parametrize("changes", [{}, {"recompute": "core_attn"}], ids=str)
def test_attention_and_mlp_apart_keep_the_bytes_of_one_layer(changes):
    whole, apart = replace(PLAIN, **changes), hybrid("*-", **changes)
    span = LENGTH // 2, LENGTH
    for size in (layer_activation, layer_keys_values):
        assert sum(size(apart, layer, *span) for layer in (0, 1)) == pytest.approx(size(whole, 0, *span))
    assert sum(layer_parameters(apart.model, layer)[0] for layer in (0, 1)) == layer_parameters(GPT, 0)[0]


def test_a_state_is_a_matrix_a_head_and_convolution_columns():
    setup = hybrid("G*M-", micro_batch_size=3)
    net = 4 * 16 * 128 * 64 + 2 * 3 * (2 * 8 * 128 + 16 * 64)
    mamba = 4 * 32 * 64 * 128 + 2 * 3 * (32 * 64 + 2 * 8 * 128)
    assert [layer_state(setup, layer) for layer in range(4)] == [3 * net / 2, 0, 3 * mamba / 2, 0]
    assert [layer_keys_values(setup, layer, 0, 100) > 0 for layer in range(4)] == [False, True, False, False]


def test_states_are_counted_by_segment_layer_and_unit_in_flight():
    setup = hybrid("GG*-GG*-", placement=Placement(2), num_microbatches=3)
    schedule = build("1f1b", setup.shape)
    of_stage = 2 * layer_state(setup, 0)
    assert unit_bytes(setup, setup.stages[0])[:, Use.STATES].tolist() == [of_stage] * 3 + [0]
    # In flight are 5 units and 4. Most bytes are there where the first rank receives a second gradient, when one of its
    # units is the last segment of its micro-batch. One more state is the gradient that goes back to the segment before.
    states = [rank_memory(setup, schedule.ranks[rank], rank).states for rank in (0, 1)]
    assert states == [(4 + 1) * of_stage, (4 + 1) * of_stage]


def test_keys_and_values_and_their_gradients_have_a_buffer_each():
    setup = replace(PLAIN, placement=Placement(2), layers_per_stage=(), num_microbatches=3)
    schedule = build("1f1b", setup.shape)
    of_layer = layer_keys_values(setup, 0, 0, LENGTH // 4)
    assert of_layer == 2 * 2 * 2 * GPT.head_dim * LENGTH  # two KV heads a rank, in 16 bit
    assert layer_keys_values(setup, 0, LENGTH // 4, LENGTH // 2) == 0
    more_ranks = replace(PLAIN, tensor_parallel=8, segments=(LENGTH,))  # than KV heads, each with a whole one
    assert layer_keys_values(more_ranks, 0, 0, LENGTH) == of_layer / 2
    latent = replace(PLAIN, model=replace(GPT, latent=LatentAttention(0, 64, 16, 8, 16)))  # keeps them expanded
    assert layer_keys_values(latent, 0, 0, LENGTH // 4) == 2 * LENGTH * 16 * (16 + 8 + 16) / 2
    # Two micro-batches are in flight, one of them between its first backward and its last. Gradients have 32 bit, those
    # of the last segment no place in the buffer.
    for rank in (0, 1):
        assert rank_memory(setup, schedule.ranks[rank], rank).keys_values == 2 * (2 * of_layer + 2 * of_layer * 3 / 4)


WINDOWED = replace(PLAIN, model=replace(GPT, window=1024, window_layers=(0, 2)))


def test_a_window_keeps_units_in_flight_and_its_own_gradients():
    sizes = [layer_keys_values_gradients(WINDOWED, layer) for layer in range(4)]
    assert sizes[0] == sizes[2] == sizes[1] * 1024 / (LENGTH - LENGTH // 4) and sizes[1] == sizes[3]
    full, within = (rank_memory(each, build("1f1b", each.shape).ranks[0], 0) for each in (PLAIN, WINDOWED))
    # Four units are in flight, as many as a micro-batch has, of two micro-batches.
    buffer = layer_keys_values(PLAIN, 0, 0, LENGTH // 4)
    assert full.keys_values - within.keys_values == pytest.approx(2 * (sizes[1] - sizes[0]) + 2 * buffer)


def test_of_segments_that_are_computed_again_a_window_is_kept():
    again = replace(WINDOWED, recompute="full")
    sizes = [[layer_keys_values(setup, layer, 0, LENGTH // 4) for layer in range(4)] for setup in (WINDOWED, again)]
    assert sizes[0] == [sizes[0][1] * share for share in (1 / 4, 1, 1 / 4, 1)]
    assert sizes[1] == [sizes[0][1] * share for share in (1 / 16, 1, 1 / 16, 1)]
    # Layers of both kinds count, though they have the same blocks.
    assert unit_bytes(again, again.stages[0])[0, Use.KEYS_VALUES] == sum(sizes[1])


def test_attention_that_is_kept_is_its_output_and_logsumexp():
    full, kept_too = (replace(PLAIN, recompute=name) for name in ("full", "all but attention"))
    more = layer_activation(kept_too, 0, 0, 4096) - layer_activation(full, 0, 0, 4096)
    assert more == 4096 * (2 * GPT.hidden_size + 4 * GPT.num_heads) / 2


@pytest.mark.parametrize(
    "changes, sentence",
    [
        *(({"recompute": each}, "has no costs; drop it") for each in ("", "full mlp", "layernorm other")),
        ({"segments": (50, 50)}, f"segments of 100 tokens do not make {LENGTH}"),
        ({"model": hybrid("*D").model, "layers_per_stage": ()}, "a layer D of unknown cost"),
    ],
    ids=["no module", "two ways", "unknown", "segments", "a layer"],
)
def test_what_has_no_costs_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        layer_activation(replace(PLAIN, **changes), 1, 0, LENGTH)


def test_up_projections_computed_again_leave_only_latents():
    model = preset("deepseek-v3")
    setup = TrainingSetup(model, 4096, 4)
    again = replace(setup, recompute="mla_up_proj")
    attention = setup.blocks(0)[0].attention
    spared = layer_activation(setup, 0, 0, 4096) - layer_activation(again, 0, 0, 4096)
    assert spared == pytest.approx(2 * 4096 * attention.heads * attention.score_dim)
    assert layer_keys_values(setup, 0, 0, 4096) > layer_keys_values(again, 0, 0, 4096) == 0
    # A segment attends to those of earlier ones.
    segments = (2048, 2048)
    kept = [layer_keys_values(replace(each, segments=segments), 0, 0, 2048) for each in (setup, again)]
    assert kept[0] == kept[1] > 0


def test_shared_experts_computed_again_are_not_kept():
    setup = TrainingSetup(preset("deepseek-v3"), 4096, 4)
    again = replace(setup, recompute="shared_experts")
    spared = [layer_activation(setup, layer, 0, 4096) - layer_activation(again, layer, 0, 4096) for layer in (0, 3)]
    assert spared == [0, 2 * 4096 * 3 * 2048]


def test_of_layers_recomputed_in_part_the_rest_is_kept():
    none, full = (replace(PLAIN, segments=(LENGTH,), recompute=name) for name in ("none", "full"))
    setups = none, replace(full, recomputed_share=0.25), full
    sizes = [layer_activation(each, 0, 0, LENGTH) + layer_keys_values(each, 0, 0, LENGTH) for each in setups]
    assert sizes[1] == pytest.approx(0.75 * sizes[0] + 0.25 * sizes[2])
    times = [repeated_time(each, read_machine("a100-80gb"), 0, LENGTH, 0) for each in setups]
    assert times[1] == pytest.approx(0.25 * times[2]) and times[0] == 0


def test_context_parallel_ranks_share_heads_of_segments():
    on_one_rank = replace(PLAIN, tensor_parallel=1)  # four KV heads
    setups = [replace(on_one_rank, context_parallel=size) for size in (1, 2, 4, 16)]
    sizes = [layer_keys_values(each, 0, 0, LENGTH // 4) for each in setups]
    assert sizes == [sizes[0] / shares for shares in (1, 2, 4, 4)]
    assert layer_keys_values(replace(setups[3], segments=(LENGTH,)), 0, 0, LENGTH) == sizes[0] / 16


def test_megatrons_layers_move_whole():
    """--cpu-offloading-num-layers 4 of 32: what they keep is on the host, but for two of them; a slow link holds up
    forwards and backwards."""
    machine = read_machine("h100-80gb")
    slow = replace(machine, device=structs.replace(machine.device, host_bandwidth=1e6))
    none = TrainingSetup(preset("llama3-8b"), 4096, 2, keeps_logits=True)
    setup = replace(none, offloads=4 / 32, moves=Moves.LAYERS)
    (stage,) = none.stages
    layer = layer_activation(none, 0, 0, 4096) + layer_keys_values(none, 0, 0, 4096)
    assert moved_bytes(setup)[0][0] == pytest.approx(4 * layer)
    assert unit_bytes(none, stage).sum() - unit_bytes(setup, stage).sum() == pytest.approx(4 * layer)
    running = [changes_of(each, stage, Kind.F)[0, Phase.RUNS, Use.WORKING] for each in (none, setup)]
    assert running[1] - running[0] == pytest.approx(2 * layer)
    ((forward,), (inputs,), (weight,)) = stage_rows(setup, slow)[0]
    copies = 4 * layer / 1e6 + slow.host.action
    assert forward == inputs + weight == pytest.approx(copies)
    assert stage_rows(setup, machine) == stage_rows(none, machine)
    assert host_bytes(setup, build("1f1b", setup.shape).ranks[0]) == pytest.approx(4 * layer)


def test_megatrons_modules_move_all_but_feed_forward_blocks():
    """--fine-grained-activation-offloading: bytes of a token and hidden unit, and the time of a slow link."""
    whole = TrainingSetup(preset("30b"), 4096, 2, placement=Placement(2), offloads=1.0, moves=Moves.MODULES)
    unit, layers = 4096 * whole.model.hidden_size, 32
    log_sum_exp = 4096 * 4 * whole.model.num_heads
    for recompute, stays, moves in (("none", 18, 14), ("layernorm mlp", 0, 12), ("full", 2, 0)):
        setup = replace(whole, recompute=recompute)
        stay = unit_bytes(setup, setup.stages[0]).sum() / layers
        moved = moved_bytes(setup)[0][0] / layers
        assert (stay, moved) == (stays * unit, moves * unit + log_sum_exp * (moves > 0))
    machine = read_machine("h100-80gb")
    slow = replace(machine, device=structs.replace(machine.device, host_bandwidth=1e6))
    action = slow.host.action
    for setup in (whole, replace(whole, offloads=0.5)):
        (_, (backward,), _) = stage_rows(setup, slow)[0]
        assert backward + stage_rows(setup, slow)[0][2][0] == pytest.approx(moved_bytes(setup)[0][0] / 1e6 + action)
    order = build("1f1b", whole.shape).ranks[0]
    assert host_bytes(whole, order) == 2 * moved_bytes(whole)[0][0]
