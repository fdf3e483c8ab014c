"""The time of a segment on a layer, the embedding or the loss, kernel by kernel and collective by collective. Seconds.

FLOPs follow arXiv 2104.04473, section 3.4, exchanges of tensor and sequence parallelism arXiv 2205.05198, section 4.2;
`context_exchange` has those of context parallelism.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, singledispatch
from math import ceil
from operator import add
from typing import NamedTuple

from .blocks import BYTES, Block, Product, blocks_of, pairs
from .context_exchange import BothPasses, comm_types, context_exchange
from .layer_bytes import keeps_logits
from .machine import ATTENTION_BLOCK, Group, Machine
from .model_shape import ModelShape
from .training_setup import ALL_BUT_ATTENTION, StageLayers, TrainingSetup

# Guesses: the share of the products of weight gradients that can hide a collective; the bytes that PyTorch's kernels
# move for each logit of a loss in 32 bit.
_HIDING = 0.8
_OF_LOGIT_FORWARD = 40
_OF_LOGIT_BACKWARD = 16
# Transformer Engine's loss reads logits in 16 bit twice and writes their gradients in the forward, and scales these in
# the backward (transformer_engine/common/triton/cross_entropy.py).
_OF_FUSED_LOGIT_FORWARD = 6
_OF_FUSED_LOGIT_BACKWARD = 4
# cuBLAS sums the gradients of the first products of experts into those of their biases. None of its kernels for Hopper
# and later does so beside a product in 16 bit, by their names (cuBLASLt 13.1): one more reading of them is the least.
_OF_FIRST_BIASES = 2


class _Kernels(NamedTuple):
    """What PyTorch runs for each number of a tensor."""

    single: float  # results that it computes number by number, see Device.single_numbers
    single_bytes: float  # that these kernels move
    other_bytes: float  # that the others move
    launches: int  # of biases for each expert


# Forward and backward. Megatron adds the biases of last products expert by expert (TEGroupedMLP._apply_bias): a product
# with the router's probabilities, a sum, and the outputs of all experts in one tensor; the backward has a product and a
# sum for the gradient of each factor. With probabilities in 32 bit there are casts of outputs and of gradients.
_BIASES_IN_16_BIT = (_Kernels(1, 2, 10, 2), _Kernels(2, 8, 4, 4))
_BIASES_IN_32_BIT = (_Kernels(2, 14, 14, 2), _Kernels(2, 16, 20, 6))
# Before activation functions both halves of gated products are cut and joined (weighted_bias_quick_geglu_impl); the
# backward compares each with its limits, takes the gradient or zero, and joins them.
_CLAMPS = (_Kernels(1, 4, 4, 3), _Kernels(2.5, 9.5, 5.5, 7))


class Parts(NamedTuple):
    """Seconds of one direction of a segment on one layer, by what takes them."""

    matmul: float
    attention: float
    other: float
    exchange: float  # collectives of tensor parallelism that nothing hides
    all_to_all: float  # exchanges of context parallelism
    dispatch: float  # tokens on the way to experts and back

    @property
    def total(self) -> float:
        return sum(self)

    def beside(self, **work: float) -> "Parts":
        """What remains to be seen of the named parts while other work, of these seconds, hides them."""
        return self._replace(**{name: max(0.0, getattr(self, name) - seconds) for name, seconds in work.items()})


NOTHING = Parts(matmul=0.0, attention=0.0, other=0.0, exchange=0.0, all_to_all=0.0, dispatch=0.0)


class LayerTime(NamedTuple):
    """Seconds of one segment on one layer: its forward, its input gradients and its weight gradients."""

    forward: Parts
    input: Parts
    weight: float


class Seconds(NamedTuple):
    """Seconds of one segment: of its forward, its input gradients and its weight gradients."""

    forward: float
    input: float
    weight: float


@singledispatch
def layer_time(setup: TrainingSetup, machine: Machine, start: int, end: int, layer: int = 0) -> LayerTime:
    """The time of the tokens [start, end) of a micro-batch on a layer, without recomputation. Raises ValueError for an
    unknown layer."""
    forward, back, weight = _dense_time_of_layer(setup.dense_setup, machine, start, end, layer)
    # Products that add to gradients also read and write these.
    weight = max(weight, machine.device.moving_time(2 * setup.gradient_bytes * setup.layer_parameters(layer).dense))
    # Tensor-parallel collectives run beside products of weight gradients, or beside all with --tp-comm-overlap.
    if setup.hides_tensor_exchange:
        forward = forward.beside(exchange=forward.matmul)
        back = back.beside(exchange=back.matmul + weight)
    elif not setup.splits_backward:
        back = back.beside(exchange=min(forward.exchange, _HIDING * weight))
    routed = _routed_time_of_layer(setup, machine, end - start, layer)
    weight += routed.weight
    return LayerTime(Parts(*map(add, forward, routed.forward)), Parts(*map(add, back, routed.input)), weight)


def layer_times(setup: TrainingSetup, machine: Machine, layer: int) -> tuple[LayerTime, ...]:
    """`layer_time` of every segment."""
    return _layer_times(setup.without_recomputation(), machine, layer)


@lru_cache(maxsize=8192)
def _layer_times(setup: TrainingSetup, machine: Machine, layer: int) -> tuple[LayerTime, ...]:
    """All recomputations share these."""
    return tuple(layer_time(setup, machine, *span, layer) for span in setup.spans)


@lru_cache(maxsize=1 << 15)
def _dense_time_of_layer(setup: TrainingSetup, machine: Machine, start: int, end: int, layer: int) -> LayerTime:
    """`_dense_time` of all blocks of a layer; set-ups that differ in their experts share it."""
    return _dense_time(setup, machine, setup.blocks(layer), start, end, layer)


def _dense_time(
    setup: TrainingSetup, machine: Machine, blocks: Sequence[Block], start: int, end: int, layer: int
) -> LayerTime:
    """Blocks without routed experts; nothing hides collectives. Only the first block of a layer attends or recurs."""
    device = machine.device
    length = end - start
    rows = setup.rows(length)
    residual = setup.residual(length)
    products = [product for block in blocks for product in block.products]
    scan = _scan_times(setup, machine, blocks, length)
    cast = cast_times(machine, products, rows)
    # A norm (read, write) and an addition to the residual (read two, write one) for each block, and its inside.
    whole = len(blocks) * residual
    moved = BYTES * rows * sum(block.moved for block in blocks)
    # A sum over the tensor-parallel ranks each way for each block with products that they share; with sequence
    # parallelism in two halves, and the inputs are gathered once more for the weight gradients.
    sums = sum(bool(block.products) for block in blocks)
    exchange = sums * machine.all_reduce_time(setup.tensor_group, setup.whole_input(length))
    attention = _attention(setup, machine, blocks[0], start, end, layer)
    exchanged = context_exchange(setup, machine, blocks[0], length, attention)
    forward = Parts(
        matmul=scan.forward + sum(device.matmul_time(rows, product.outputs, product.inputs) for product in products),
        attention=attention.forward,
        other=cast.forward + device.moving_time(5 * whole + moved, 5 * len(blocks)),
        exchange=exchange,
        all_to_all=exchanged.forward,
        dispatch=0.0,
    )
    back = Parts(
        matmul=scan.backward + sum(device.matmul_time(rows, product.inputs, product.outputs) for product in products),
        attention=attention.backward,
        other=cast.backward + device.moving_time(7 * whole + 1.5 * moved, 7 * len(blocks)),
        exchange=exchange * (1.5 if setup.sequence_parallel else 1),
        all_to_all=exchanged.backward,
        dispatch=0.0,
    )
    weight = sum(device.matmul_time(product.outputs, product.inputs, rows) for product in products)
    return LayerTime(forward, back, weight)


def _scan_times(setup: TrainingSetup, machine: Machine, blocks: Sequence[Block], length: int) -> BothPasses:
    """The time of recurrences; the backward has twice the FLOPs."""
    rate = machine.device.peak_flops * machine.device.matmul_efficiency
    forward = backward = 0.0
    for block in blocks:
        slower_forward, slower_backward = block.scan_slower
        forward += slower_forward * block.scan
        backward += 2 * slower_backward * block.scan
    rows = setup.rows(length)
    return BothPasses(rows * forward / rate, rows * backward / rate)


def cast_times(machine: Machine, products: Sequence[Product], rows: float) -> BothPasses:
    """Casts of what enters products of `rows` rows: their inputs in the forward, gradients of their outputs in the
    backward."""
    device = machine.device
    if not device.cast_bytes:
        return BothPasses(0.0, 0.0)

    def cast_time(columns: float) -> float:
        return device.moving_time(device.cast_bytes * rows * columns, len(products))

    forward = cast_time(sum(product.inputs for product in products))
    backward = cast_time(sum(product.outputs for product in products))
    return BothPasses(forward, backward)


def _attention(setup: TrainingSetup, machine: Machine, block: Block, start: int, end: int, layer: int) -> BothPasses:
    """The time of attention."""
    if block.attention is None:
        return BothPasses(0.0, 0.0)
    device = machine.device
    batch = setup.micro_batch_size
    length = end - start
    keys = setup.model.keys_given(layer, start, end)
    window = setup.model.window_of(layer)
    seen = _computed_pairs(start, end, window)
    if setup.seen:
        without_window = setup.seen[setup.spans.index((start, end))]
        # The average unit of long sequences sees more than its own tokens (planner/unit_search.py).
        seen = without_window if window is None else min(seen, without_window)
    heads = block.attention.heads / setup.context_parallel * batch
    size = (block.attention.score_dim + block.attention.value_dim) / 2
    forward = device.flash_time(length, keys, seen, heads, size, backward=False)
    back = device.flash_time(length, keys, seen, heads, size, backward=True)
    if len(setup.segments) > 1:
        # Gradients of the keys and values of the prefix are added to sums in 32 bit.
        cached = batch * keys / setup.context_parallel * block.attention.keys_values
        back += device.moving_time((BYTES + 8) * cached, 2)
    return BothPasses(forward, back)


def _computed_pairs(start: int, end: int, window: int | None) -> float:
    """The pairs that attention of the tokens [start, end) computes. For a block of queries it takes the blocks of keys
    in their windows, one more than a window has, and as long as for a second one to begin and end: three blocks for a
    window of 128 keys, ten for one of 1,024. With cuDNN on H200 and heads of 64 the first takes 0.37 (forward) and 0.44
    (backward) as long as the second (cudnn-frontend, benchmark/attention_training/results/gpt_oss/h200 and
    benchmark/sdpa_benchmark_training/results/h200_919_only_cudnn)."""
    seen = pairs(start, end, window)
    if window is None or not window:
        return seen
    return min(pairs(start, end, None), seen * (window + 2 * ATTENTION_BLOCK) / window)


@lru_cache(maxsize=1 << 14)
def _routed_time_of_layer(setup: TrainingSetup, machine: Machine, length: int, layer: int) -> LayerTime:
    """`_routed_time` of all blocks of a layer; segments of one length share it."""
    return _routed_time(setup, machine, setup.blocks(layer), length, layer)


def _routed_time(setup: TrainingSetup, machine: Machine, blocks: Sequence[Block], length: int, layer: int) -> LayerTime:
    """The time of the routed experts of blocks; at most one block has some."""
    block = next((block for block in blocks if block.expert), None)
    if block is None:
        return LayerTime(NOTHING, NOTHING, 0.0)
    device = machine.device
    hidden = setup.model.hidden_size
    first, last = block.expert
    tokens = setup.rows(length) / setup.tensor_parallel
    routed = tokens * block.active
    here = block.experts / setup.expert_parallel
    # One grouped product: each expert has its part of the tokens of all ranks of the group.
    matmul = sum(device.matmul_time(routed / here, product.outputs, product.inputs, here) for product in block.expert)
    weight = sum(device.matmul_time(product.outputs, product.inputs, routed / here, here) for product in block.expert)
    adding = device.moving_time(2 * setup.gradient_bytes * setup.layer_parameters(layer).routed)
    router = device.matmul_time(tokens, block.experts, hidden)
    # Sorting tokens by expert and back, each a read and a write; the activation function.
    other = device.moving_time(BYTES * routed * (4 * hidden + first.outputs + last.inputs), 12)
    around = _around_experts(setup, machine, block, routed)
    forward = NOTHING._replace(
        matmul=matmul + router,
        other=other + around.forward + machine.host.counts,
        dispatch=_dispatch_time(setup, machine, tokens),
    )
    back = forward._replace(other=2 * other + around.backward)
    return LayerTime(forward, back, max(weight, adding) + router)


def _around_experts(setup: TrainingSetup, machine: Machine, block: Block, routed: float) -> BothPasses:
    """Kernels around the products of experts that few models or machines have, for `routed` tokens on a rank: casts,
    padding, biases and clamped activations, forward and backward."""
    device = machine.device
    outputs = routed * setup.model.hidden_size
    forward, backward = cast_times(machine, block.expert, routed)
    if device.padding_bytes:
        padding = device.moving_time(device.padding_bytes * outputs, 2)
        forward += padding
        backward += padding
    if setup.model.has_biases:
        here = ceil(block.experts / setup.expert_parallel)
        biases = _BIASES_IN_32_BIT if setup.routes_in_32_bit else _BIASES_IN_16_BIT
        of_biases = _kernel_times(machine, biases, outputs, here)
        forward += of_biases.forward
        backward += of_biases.backward + device.moving_time(_OF_FIRST_BIASES * routed * block.expert[0].outputs, here)
    if setup.model.clamps_activations:
        clamps = _clamp_times(machine, block, routed)
        forward += clamps.forward
        backward += clamps.backward
    return BothPasses(forward, backward)


def _clamp_times(machine: Machine, block: Block, routed: float) -> BothPasses:
    """Clamps of what enters the activation functions of experts, for `routed` tokens on a rank."""
    return _kernel_times(machine, _CLAMPS, routed * block.expert[0].outputs)


def _kernel_times(
    machine: Machine, kernels: tuple[_Kernels, _Kernels], numbers: float, num_parts: int = 1
) -> BothPasses:
    """The kernels of the forward and of the backward, for a tensor of so many numbers in so many parts."""

    def seconds(of_pass: _Kernels) -> float:
        single = machine.device.single_time(of_pass.single * numbers, of_pass.single_bytes * numbers)
        return single + machine.device.moving_time(of_pass.other_bytes * numbers, of_pass.launches * num_parts)

    in_forward, in_backward = kernels
    return BothPasses(seconds(in_forward), seconds(in_backward))


@lru_cache(maxsize=4096)
def layers_with_experts(model: ModelShape, stage: StageLayers) -> int:
    """The number of layers of a stage that have experts."""
    return sum(count for layer, count in stage.layers if any(block.expert for block in blocks_of(model, layer)))


def _dispatch_time(setup: TrainingSetup, machine: Machine, tokens: float) -> float:
    """Seconds in which the tokens of a rank travel to their experts and back."""
    group = Group(setup.expert_parallel, 1)
    experts = setup.model.experts
    if experts is None or group.size == 1:
        return 0.0
    sent = BYTES * tokens * setup.model.hidden_size
    if not setup.dispatches_once:
        return 2 * machine.all_to_all_time(group, experts.active * sent)
    nodes = ceil(group.size / group.in_node(machine))
    return 2 * machine.multicast_time(group, sent, experts.reached(nodes), experts.reached(group.size))


def repeated_time(
    setup: TrainingSetup, machine: Machine, start: int, end: int, layer: int, forward: Parts | None = None
) -> float:
    """Seconds of what the backward of a layer computes again. `forward` is that of `layer_time`, if it is known."""
    device = machine.device
    length = end - start
    modules = setup.recompute.split()
    if forward is None:
        forward = layer_time(setup, machine, start, end, layer).forward
    if setup.recomputes_layers:
        repeated = forward.total - (forward.attention if setup.recompute == ALL_BUT_ATTENTION else 0.0)
        return setup.recomputed_share * repeated
    again = forward.attention if "core_attn" in modules else 0.0
    residual = setup.residual(length)
    for block in setup.blocks(layer):
        if "layernorm" in modules:
            again += device.moving_time(2 * residual, 1)
        if setup.repeats(block.symbol):  # all but the norm and the addition to the residual
            time = _dense_time(setup, machine, (block,), start, end, layer).forward
            shown = time.total - (time.exchange if setup.hides_tensor_exchange else 0.0)
            again += shown - device.moving_time(5 * residual, 4)
            routed = _routed_time(setup, machine, (block,), length, layer).forward
            again += routed.total - routed.dispatch + dispatched_again(setup, routed)
            continue
        rows = setup.rows(length)
        if "moe_act" in modules and block.expert:
            again += device.moving_time(3 * rows * block.activated, 1)
            if setup.model.clamps_activations:
                routed_tokens = rows / setup.tensor_parallel * block.active
                again += _clamp_times(machine, block, routed_tokens).forward
        if "shared_experts" in modules and block.expert:
            again += _products_again(setup, machine, block.products, rows)
            again += device.moving_time(BYTES * rows * block.moved, 2)
        if "mla_up_proj" in modules and block.symbol == "+":
            again += _products_again(setup, machine, block.up_projections, rows)
            again += device.moving_time(BYTES * rows * block.moved, 5)  # rotary positions and layouts
    return again


def _products_again(setup: TrainingSetup, machine: Machine, products: Sequence[Product], rows: float) -> float:
    """Seconds of the forward of these products."""
    cast = cast_times(machine, products, rows).forward
    return cast + sum(machine.device.matmul_time(rows, product.outputs, product.inputs) for product in products)


def dispatched_again(setup: TrainingSetup, forward: Parts) -> float:
    """Seconds of the exchange of experts that are computed again: there and back, or only there in a plan with pairs
    (runtime/forwards/repeated_experts.py)."""
    if not setup.repeats("E"):
        return 0.0
    return forward.dispatch / 2 if setup.hides_experts else forward.dispatch


@lru_cache(maxsize=4096)
def fastest_cp_comm_type(setup: TrainingSetup, machine: Machine) -> str | None:
    """The way that exchanges whole sequences fastest in the first stage; None without context parallelism."""

    def seconds(way: str) -> float:
        exchanging = replace(setup, cp_comm_type=way)
        end = setup.sequence_length
        times = [(count, layer_time(exchanging, machine, 0, end, layer)) for layer, count in setup.stages[0].layers]
        return sum(count * (time.forward.all_to_all + time.input.all_to_all) for count, time in times)

    return None if setup.context_parallel == 1 else min(comm_types(setup, machine), key=seconds)


def embedding_time(setup: TrainingSetup, machine: Machine, start: int, end: int) -> Seconds:
    """The time of the tokens [start, end) in the embedding."""
    moved = setup.whole_input(end - start)
    exchange = machine.all_reduce_time(setup.tensor_group, moved) / (2 if setup.sequence_parallel else 1)
    return Seconds(
        forward=machine.device.moving_time(2 * moved, 3) + exchange,
        input=exchange if setup.sequence_parallel else 0.0,
        weight=machine.device.moving_time(4 * moved, 3),
    )


def head_time(setup: TrainingSetup, machine: Machine, start: int, end: int) -> Seconds:
    """The time of the tokens [start, end) in the projection to the vocabulary and the loss, and of prediction heads."""
    device = machine.device
    model = setup.model
    rows = setup.rows(end - start)
    hidden = model.hidden_size
    columns = model.vocab_size / setup.tensor_parallel
    logits = rows * columns
    once = machine.all_reduce_time(setup.tensor_group, setup.whole_input(end - start))
    if setup.fuses_loss:
        loss_forward = device.moving_time(_OF_FUSED_LOGIT_FORWARD * logits, 3)
        loss_backward = device.moving_time(_OF_FUSED_LOGIT_BACKWARD * logits, 1)
    else:
        loss_forward = device.moving_time(_OF_LOGIT_FORWARD * logits, 10)
        loss_backward = device.moving_time(_OF_LOGIT_BACKWARD * logits, 4)
    of_logits = device.matmul_time(rows, columns, hidden) + loss_forward
    forward = of_logits + (once / 2 if setup.sequence_parallel else 0.0)
    back = device.matmul_time(rows, hidden, columns) + loss_backward + once
    adding = device.moving_time(2 * setup.gradient_bytes * setup.embedding_parameters)
    weight = max(device.matmul_time(columns, hidden, rows), adding)
    if not keeps_logits(setup):  # the input gradients of pieces compute the logits again, and the weight gradients
        back = back + of_logits + weight
        weight = 0.0
    joining = model.prediction_depth * device.matmul_time(rows, hidden / setup.tensor_parallel, 2 * hidden)
    heads = 1 + model.prediction_depth
    return Seconds(
        forward=heads * forward + joining,
        input=heads * back + joining,
        weight=heads * weight + joining,
    )
