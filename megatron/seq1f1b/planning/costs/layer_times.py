"""How long one layer takes for one segment: kernel by kernel, collective by collective. Seconds.

A layer is a sequence of blocks. FLOPs follow arXiv 2104.04473, section 3.4; what tensor and sequence
parallelism exchange follows arXiv 2205.05198, section 4.2.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, singledispatch
from typing import NamedTuple

from .blocks import BYTES, Block, blocks_of
from .context_exchange import comm_types, context_exchange
from .flops import pairs
from .layer_bytes import keeps_logits
from .machine import Machine
from .operations import all_reduce_time, all_to_all_time, flash_time, matmul_time, moving_time
from .training_setup import ALL_BUT_ATTENTION, TrainingSetup

# The share of the time of weight gradients' products that can hide a collective: a guess.
_HIDING = 0.8
# Bytes that move for each logit while the loss is taken in 32 bit, step by step: guesses, by the tensors that PyTorch's
# kernels read and write.
_OF_LOGIT_FORWARD, _OF_LOGIT_BACKWARD = 40, 16


class Parts(NamedTuple):
    """One direction of a segment on one layer, by what its seconds are spent on."""

    matmul: float
    attention: float
    other: float
    exchange: float  # what tensor parallelism does not hide of its collectives
    all_to_all: float  # what context and expert parallelism exchange

    @property
    def total(self) -> float:
        return sum(self)


class LayerTime(NamedTuple):
    """One segment on one layer: its forward, its input gradients and its weight gradients. Seconds on the device."""

    forward: Parts
    input: Parts
    weight: float


@singledispatch
def layer_time(setup: TrainingSetup, machine: Machine, start: int, end: int, layer: int = 0) -> LayerTime:
    """The time of the tokens [start, end) of every sequence of a micro-batch in layer number `layer`, without
    recomputation. Raises ValueError for a layer whose cost is not known."""
    blocks, rows = blocks_of(setup.model, layer), setup.rows(end - start)
    forward_matmul, input_matmul, weight = _products(setup, machine, layer, rows)
    forward_attention, input_attention = _attention(setup, machine, layer, start, end)
    forward_other, input_other = _moving(setup, machine, blocks, rows)
    products = forward_matmul, input_matmul, weight
    forward_exchange, input_exchange = _tensor_exchange(setup, machine, blocks, rows, products)
    attention = forward_attention, input_attention
    forward_exchanged, input_exchanged = context_exchange(setup, machine, layer, end - start, attention)
    routed = expert_time(setup, machine, rows, layer)
    forward_matmul, input_matmul = forward_matmul + routed.matmul, input_matmul + routed.matmul
    forward_other, input_other = forward_other + routed.other, input_other + 2 * routed.other
    sent = routed.all_to_all, routed.all_to_all
    if setup.hides_experts:
        # A forward runs beside the backward of another micro-batch.
        sent = (
            max(0.0, routed.all_to_all - input_matmul - input_attention - weight - routed.weight),
            max(0.0, routed.all_to_all - forward_matmul - forward_attention),
        )
    return LayerTime(
        Parts(forward_matmul, forward_attention, forward_other, forward_exchange, forward_exchanged + sent[0]),
        Parts(input_matmul, input_attention, input_other, input_exchange, input_exchanged + sent[1]),
        weight + routed.weight,
    )


@lru_cache(maxsize=4096)
def fastest_cp_comm_type(setup: TrainingSetup, machine: Machine) -> str | None:
    """The way that exchanges whole sequences fastest, over the layers of the first stage; None without ranks for it."""

    def seconds(way: str) -> float:
        each = replace(setup, cp_comm_type=way)
        times = (
            (count, layer_time(each, machine, 0, setup.sequence_length, layer))
            for layer, count in setup.stage_layers[0].items()
        )
        return sum(count * (time.forward.all_to_all + time.input.all_to_all) for count, time in times)

    return None if setup.context_parallel == 1 else min(comm_types(setup, machine), key=seconds)


def _products(setup: TrainingSetup, machine: Machine, layer: int, rows: float) -> tuple[float, float, float]:
    """Matrix products of the forward, of input gradients and of weight gradients; recurrences as products."""
    device, blocks = machine.device, blocks_of(setup.model, layer)
    weights = [product.on_rank(setup.tensor_parallel) for block in blocks for product in block.products]
    scan = rows * sum(block.scan for block in blocks) / setup.tensor_parallel
    scan /= device.peak_flops * device.matmul_efficiency
    forward = scan + sum(matmul_time(device, rows, out, into) for out, into in weights)
    back = 2 * scan + sum(matmul_time(device, rows, into, out) for out, into in weights)
    weight = sum(matmul_time(device, out, into, rows) for out, into in weights)
    # A product that adds to gradients reads and writes them meanwhile.
    adding = moving_time(device, 2 * setup.gradient_bytes * setup.layer_parameters(layer))
    return forward, back, max(weight, adding)


def _attention(setup: TrainingSetup, machine: Machine, layer: int, start: int, end: int) -> tuple[float, float]:
    """Attention of the forward and of the input gradients."""
    device, batch, length, window = machine.device, setup.micro_batch_size, end - start, setup.model.window_of(layer)
    keys = end if window is None else min(end, length + window)
    seen = pairs(start, end, window)
    if setup.seen:
        seen = min(seen, setup.seen[setup.spans.index((start, end))])
    forward = back = cached = 0.0
    for attention in (block.attention for block in blocks_of(setup.model, layer) if block.attention):
        heads = attention.heads / setup.tensor_parallel / setup.context_parallel
        size = (attention.score_dim + attention.value_dim) / 2
        sizes = (device, length, keys, seen, heads, size, batch)
        forward += flash_time(*sizes)
        back += flash_time(*sizes, backward=True)
        cached += batch * keys / setup.context_parallel * attention.keys_values(setup.tensor_parallel)
    if len(setup.segments) > 1 and forward:
        # Gradients of the keys and values of the prefix are added to sums in 32 bit.
        back += moving_time(device, (BYTES + 8) * cached, 2)
    return forward, back


def _moving(setup: TrainingSetup, machine: Machine, blocks: Sequence[Block], rows: float) -> tuple[float, float]:
    """Kernels of the forward and of the input gradients that only move data."""
    # A norm (read, write) and an addition to the residual (read two, write one) for each block, and what is inside.
    whole = len(blocks) * rows * setup.model.hidden_size / setup.token_shares
    parts = rows * sum(block.moved for block in blocks) / setup.tensor_parallel
    device = machine.device
    return (
        moving_time(device, BYTES * (5 * whole + parts), 5 * len(blocks)),
        moving_time(device, BYTES * (7 * whole + 1.5 * parts), 7 * len(blocks)),
    )


def _tensor_exchange(
    setup: TrainingSetup, machine: Machine, blocks: Sequence[Block], rows: float, products: tuple[float, float, float]
) -> tuple[float, float]:
    """What tensor parallelism does not hide of its collectives, in the forward and in the input gradients.

    They may run beside products of weight gradients, the last of `products`; with --tp-comm-overlap beside all.
    """
    # A sum over the tensor-parallel ranks each way for each block, unless tokens travel to experts instead; with
    # sequence parallelism in its two halves, and the inputs are gathered once more for the weight gradients.
    count = sum(bool(block.products) for block in blocks)
    forward = back = count * all_reduce_time(machine, setup.tensor_group, BYTES * rows * setup.model.hidden_size)
    back += forward / 2 if setup.sequence_parallel else 0.0
    if setup.hides_tensor_exchange:
        return max(0.0, forward - products[0]), max(0.0, back - products[1] - products[2])
    if not setup.splits_backward:
        # With sequence parallelism the gathering runs beside a product, and the reduction beside another.
        back -= min(forward, _HIDING * products[2])
    return forward, back


def repeated_time(setup: TrainingSetup, machine: Machine, start: int, end: int, layer: int) -> float:
    """Seconds of what the backward of a layer computes again."""
    forward, rows = layer_time(setup, machine, start, end, layer).forward, setup.rows(end - start)
    whole = rows * setup.model.hidden_size / setup.token_shares
    if setup.recomputes_layers:
        repeated = forward.total - (forward.attention if setup.recompute == ALL_BUT_ATTENTION else 0.0)
        return setup.recomputed_share * repeated
    again, modules = 0.0, setup.recompute.split()
    for symbol, block in zip(setup.model.blocks(layer), blocks_of(setup.model, layer), strict=True):
        if "core_attn" in modules and block.attention:
            again += forward.attention
        if "layernorm" in modules:
            again += moving_time(machine.device, 2 * BYTES * whole, 1)
        if "moe_act" in modules and block.expert and not setup.repeats(symbol):
            again += moving_time(machine.device, 3 * rows * block.activated / setup.tensor_parallel, 1)
        if setup.repeats(symbol):
            weights = [product.on_rank(setup.tensor_parallel) for product in block.products]
            again += sum(matmul_time(machine.device, rows, out, into) for out, into in weights)
            again += moving_time(machine.device, BYTES * rows * block.moved / setup.tensor_parallel, 1)
            if weights and not setup.hides_tensor_exchange:
                again += all_reduce_time(machine, setup.tensor_group, BYTES * rows * setup.model.hidden_size)
            if block.expert:
                routed = expert_time(setup, machine, rows, layer)
                again += routed.matmul + routed.other + routed.all_to_all
    return again


class EndTime(NamedTuple):
    """The embedding, or the projection to the vocabulary with the loss, for one segment."""

    forward: float
    input: float
    weight: float


def embedding_time(setup: TrainingSetup, machine: Machine, start: int, end: int) -> EndTime:
    moved = BYTES * setup.rows(end - start) * setup.model.hidden_size
    exchange = all_reduce_time(machine, setup.tensor_group, moved)
    if setup.sequence_parallel:
        exchange /= 2
    forward = moving_time(machine.device, 2 * moved, 3) + exchange
    back = exchange if setup.sequence_parallel else 0.0
    return EndTime(forward, back, moving_time(machine.device, 4 * moved, 3))


def head_time(setup: TrainingSetup, machine: Machine, start: int, end: int) -> EndTime:
    """The projection to the vocabulary and the loss, once more for each prediction head, which joins its inputs."""
    device, model = machine.device, setup.model
    hidden, heads, rows = model.hidden_size, 1 + model.prediction_depth, setup.rows(end - start)
    columns = model.vocab_size / setup.tensor_parallel
    logits = rows * columns
    once = all_reduce_time(machine, setup.tensor_group, BYTES * rows * hidden)
    forward = matmul_time(device, rows, columns, hidden) + moving_time(device, _OF_LOGIT_FORWARD * logits, 10)
    forward += once / 2 if setup.sequence_parallel else 0.0
    back = matmul_time(device, rows, hidden, columns) + moving_time(device, _OF_LOGIT_BACKWARD * logits, 4) + once
    adding = moving_time(device, 2 * setup.gradient_bytes * setup.embedding_parameters)
    weight = max(matmul_time(device, columns, hidden, rows), adding)
    if not keeps_logits(setup):  # in pieces, which the input gradients compute again, and the weight gradients with it
        back += matmul_time(device, rows, columns, hidden) + moving_time(device, _OF_LOGIT_FORWARD * logits, 10)
        back, weight = back + weight, 0.0
    joining = model.prediction_depth * matmul_time(device, rows, hidden / setup.tensor_parallel, 2 * hidden)
    return EndTime(heads * forward + joining, heads * back + joining, heads * weight + joining)


class ExpertTime(NamedTuple):
    """`matmul` and `all_to_all` of the forward, which the input gradients take again, and `other` of the forward."""

    matmul: float
    other: float
    all_to_all: float
    weight: float


def expert_time(setup: TrainingSetup, machine: Machine, rows: float, layer: int = 0) -> ExpertTime:
    """The routed experts of a layer, for `rows` tokens of a tensor-parallel group; nothing where it has none."""
    device, hidden = machine.device, setup.model.hidden_size
    block = next((block for block in blocks_of(setup.model, layer) if block.expert), None)
    if block is None:
        return ExpertTime(0.0, 0.0, 0.0, 0.0)
    first, last = weights = block.expert
    tokens = rows / setup.tensor_parallel
    routed = tokens * block.active
    here = block.experts / setup.expert_parallel
    # Each expert has its part of what the ranks of the group send: one grouped product.
    matmul = sum(matmul_time(device, routed / here, each.outputs, each.inputs, here) for each in weights)
    weight = sum(matmul_time(device, each.outputs, each.inputs, routed / here, here) for each in weights)
    adding = moving_time(device, 2 * setup.gradient_bytes * setup.layer_expert_parameters(layer))
    # The router; sorting tokens by expert and back, each a read and a write; the activation function.
    router = matmul_time(device, tokens, block.experts, hidden)
    other = moving_time(device, BYTES * routed * (4 * hidden + first.outputs + last.inputs), 12)
    # Tokens go to their experts and come back.
    exchanged = 2 * all_to_all_time(machine, setup.expert_group, BYTES * routed * hidden)
    return ExpertTime(matmul + router, other, exchanged, max(weight, adding) + router)
