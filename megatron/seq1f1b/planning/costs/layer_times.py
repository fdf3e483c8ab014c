"""How long one layer takes for one segment: kernel by kernel, collective by collective. Seconds.

A layer is one of a GPT in the order of Megatron: norm, projections of query, key and value, attention, output
projection, norm, feed-forward block or experts. FLOPs follow arXiv 2104.04473, section 3.4; what tensor and sequence
parallelism exchange follows arXiv 2205.05198, section 4.2.
"""

from functools import singledispatch
from typing import NamedTuple

from .machine import Machine
from .operations import BYTES, all_reduce_time, all_to_all_time, flash_time, matmul_time, moving_time
from .training_setup import TrainingSetup

# Of the products of weight gradients, the share of their time that can hide a collective: a guess.
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
def layer_time(setup: TrainingSetup, machine: Machine, start: int, end: int, has_experts: bool = False) -> LayerTime:
    """The time of the tokens [start, end) of every sequence of a micro-batch, without recomputation."""
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    widths = _Widths.of(setup, has_experts)
    forward_matmul, input_matmul, weight = _products(setup, machine, widths, rows, has_experts)
    forward_attention, input_attention = _attention(setup, machine, widths, start, end)
    forward_other, input_other = _moving(setup, machine, widths, rows)
    forward_exchange, input_exchange = _tensor_exchange(setup, machine, widths, rows, weight)
    # Context parallelism by heads: queries, keys, values and the output change from tokens to heads and back.
    context_bytes = BYTES * rows * (2 * widths.queries + 2 * widths.keys)
    context_exchange = all_to_all_time(machine, setup.context_group, context_bytes)
    routed = expert_time(setup, machine, rows) if setup.model.experts and has_experts else _NO_EXPERTS
    all_to_all = context_exchange + routed.all_to_all
    forward_matmul, input_matmul = forward_matmul + routed.matmul, input_matmul + routed.matmul
    forward_other, input_other = forward_other + routed.other, input_other + 2 * routed.other
    return LayerTime(
        Parts(forward_matmul, forward_attention, forward_other, forward_exchange, all_to_all),
        Parts(input_matmul, input_attention, input_other, input_exchange, all_to_all),
        weight + routed.weight,
    )


class _Widths(NamedTuple):
    """Columns that a tensor-parallel rank has of queries, of keys (or values), into and out of the activation."""

    queries: float
    keys: float
    into_activation: float
    activated: float

    @classmethod
    def of(cls, setup: TrainingSetup, has_experts: bool) -> "_Widths":
        model, tensor = setup.model, setup.tensor_parallel
        experts = model.experts if has_experts else None
        ffn = (experts.shared_ffn_hidden_size if experts else model.ffn_hidden_size) / tensor
        kv_heads = model.num_kv_heads or model.num_heads
        return cls(
            queries=model.num_heads * model.head_dim / tensor,
            keys=kv_heads * model.head_dim / tensor,
            into_activation=ffn * (2 if model.is_gated else 1),
            activated=ffn,
        )


def _products(
    setup: TrainingSetup, machine: Machine, widths: _Widths, rows: float, has_experts: bool
) -> tuple[float, float, float]:
    """Matrix products of the forward, of input gradients and of weight gradients."""
    device, hidden = machine.device, setup.model.hidden_size
    queries, keys, into_activation, activated = widths
    # outputs, inputs
    weights = (queries + 2 * keys, hidden), (hidden, queries), (into_activation, hidden), (hidden, activated)
    forward = sum(matmul_time(device, rows, out, into) for out, into in weights)
    back = sum(matmul_time(device, rows, into, out) for out, into in weights)
    weight = sum(matmul_time(device, out, into, rows) for out, into in weights)
    # A product that adds to gradients reads and writes them meanwhile.
    adding = moving_time(device, 2 * setup.gradient_bytes * setup.layer_parameters(has_experts))
    return forward, back, max(weight, adding)


def _attention(setup: TrainingSetup, machine: Machine, widths: _Widths, start: int, end: int) -> tuple[float, float]:
    """Attention of the forward and of the input gradients."""
    model, device, batch, length = setup.model, machine.device, setup.micro_batch_size, end - start
    heads = model.num_heads / setup.tensor_parallel / setup.context_parallel
    pairs = length * (start + end + 1) / 2
    forward = flash_time(device, length, end, pairs, heads, model.head_dim, batch)
    back = flash_time(device, length, end, pairs, heads, model.head_dim, batch, backward=True)
    if len(setup.segments) > 1:
        # Gradients of the keys and values of the prefix are added to sums in 32 bit.
        cached = batch * end / setup.context_parallel * 2 * widths.keys
        back += moving_time(device, (BYTES + 8) * cached, 2)
    return forward, back


def _moving(setup: TrainingSetup, machine: Machine, widths: _Widths, rows: float) -> tuple[float, float]:
    """Kernels of the forward and of the input gradients that only move data."""
    # Two norms (read, write) and two additions to the residual (read two, write one); then the activation function,
    # rotary positions of queries and keys, and their layout.
    whole = rows * setup.model.hidden_size / setup.token_shares
    parts = rows * (widths.into_activation + widths.activated + 4 * (widths.queries + widths.keys))
    device = machine.device
    return (
        moving_time(device, BYTES * (10 * whole + parts), 10),
        moving_time(device, BYTES * (14 * whole + 1.5 * parts), 14),
    )


def _tensor_exchange(
    setup: TrainingSetup, machine: Machine, widths: _Widths, rows: float, weight: float
) -> tuple[float, float]:
    """What tensor parallelism does not hide of its collectives, in the forward and in the input gradients.

    They may run beside products of weight gradients, which take `weight`.
    """
    # A sum over the tensor-parallel ranks each way, for each of two blocks; with sequence parallelism each in its two
    # halves, and the inputs of the block are gathered once more for the weight gradients.
    blocks = 2 if widths.activated else 1
    forward = back = blocks * all_reduce_time(machine, setup.tensor_group, BYTES * rows * setup.model.hidden_size)
    back += forward / 2 if setup.sequence_parallel else 0.0
    if not setup.splits_backward:
        # With sequence parallelism the gathering runs beside a product, and the reduction beside another.
        back -= min(forward, _HIDING * weight)
    return forward, back


class EndTime(NamedTuple):
    """The embedding, or the projection to the vocabulary with the loss, for one segment."""

    forward: float
    input: float
    weight: float


def embedding_time(setup: TrainingSetup, machine: Machine, start: int, end: int) -> EndTime:
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    moved = BYTES * rows * setup.model.hidden_size
    exchange = all_reduce_time(machine, setup.tensor_group, moved)
    if setup.sequence_parallel:
        exchange /= 2
    forward = moving_time(machine.device, 2 * moved, 3) + exchange
    back = exchange if setup.sequence_parallel else 0.0
    return EndTime(forward, back, moving_time(machine.device, 4 * moved, 3))


def head_time(setup: TrainingSetup, machine: Machine, start: int, end: int) -> EndTime:
    """The projection to the vocabulary and the loss."""
    device, hidden = machine.device, setup.model.hidden_size
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    columns = setup.model.vocab_size / setup.tensor_parallel
    logits = rows * columns
    once = all_reduce_time(machine, setup.tensor_group, BYTES * rows * hidden)
    forward = matmul_time(device, rows, columns, hidden) + moving_time(device, _OF_LOGIT_FORWARD * logits, 10)
    forward += once / 2 if setup.sequence_parallel else 0.0
    back = matmul_time(device, rows, hidden, columns) + moving_time(device, _OF_LOGIT_BACKWARD * logits, 4) + once
    adding = moving_time(device, 2 * setup.gradient_bytes * setup.embedding_parameters)
    return EndTime(forward, back, max(matmul_time(device, columns, hidden, rows), adding))


class ExpertTime(NamedTuple):
    """`matmul` and `all_to_all` of the forward, which the input gradients take again, and `other` of the forward."""

    matmul: float
    other: float
    all_to_all: float
    weight: float


_NO_EXPERTS = ExpertTime(0.0, 0.0, 0.0, 0.0)


def expert_time(setup: TrainingSetup, machine: Machine, rows: float) -> ExpertTime:
    """The time of `rows` tokens of a tensor-parallel group."""
    model, experts, device = setup.model, setup.model.experts, machine.device
    assert experts is not None, "a layer of experts without experts"
    hidden, ffn = model.hidden_size, experts.ffn_hidden_size
    fc1 = ffn * (2 if model.is_gated else 1)
    tokens = rows / setup.tensor_parallel
    routed = tokens * experts.active
    here = experts.total / setup.expert_parallel
    # Each expert has its part of what the ranks of the group send: one grouped product.
    weights = ((fc1, hidden), (hidden, ffn))  # outputs, inputs
    matmul = sum(matmul_time(device, routed / here, out, into, here) for out, into in weights)
    weight = sum(matmul_time(device, out, into, routed / here, here) for out, into in weights)
    adding = moving_time(device, 2 * setup.gradient_bytes * setup.layer_expert_parameters)
    # The router; sorting tokens by expert and back, each a read and a write; the activation function.
    router = matmul_time(device, tokens, experts.total, hidden)
    other = moving_time(device, BYTES * routed * (4 * hidden + fc1 + ffn), 12)
    # Tokens go to their experts and come back.
    exchanged = 2 * all_to_all_time(machine, setup.expert_group, BYTES * routed * hidden)
    return ExpertTime(matmul + router, other, exchanged, max(weight, adding) + router)
