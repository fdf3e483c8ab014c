"""How long one layer takes for one segment: kernel by kernel, collective by collective. Seconds.

A layer is one of a GPT in the order of Megatron: norm, projections of query, key and value, attention, output
projection, norm, feed-forward block or experts. FLOPs follow arXiv 2104.04473, section 3.4; what tensor and sequence
parallelism exchange follows arXiv 2205.05198, section 4.2.
"""

from dataclasses import dataclass

from .collectives import all_reduce_time, all_to_all_time
from .expert_times import NO_EXPERTS, expert_time
from .kernels import BYTES, flash_time, matmul_time, moving_time, unfused_attention_time
from .machine import Machine
from .training_setup import TrainingSetup


@dataclass(frozen=True)
class LayerTime:
    """One segment on one layer: the parts of each direction. Seconds on the device.

    `forward_*` are parts of the forward; `input_*` of the input gradients; `weight` are the weight gradients.
    `exchange` is what tensor parallelism does not hide, `all_to_all` what context and expert parallelism exchange.
    """

    forward_matmul: float
    forward_attention: float
    forward_other: float
    forward_exchange: float
    forward_all_to_all: float
    input_matmul: float
    input_attention: float
    input_other: float
    input_exchange: float
    input_all_to_all: float
    weight: float

    @property
    def forward(self) -> float:
        parts = self.forward_matmul, self.forward_attention, self.forward_other, self.forward_exchange
        return sum(parts) + self.forward_all_to_all

    @property
    def input(self) -> float:
        parts = self.input_matmul, self.input_attention, self.input_other, self.input_exchange
        return sum(parts) + self.input_all_to_all


def layer_time(setup: TrainingSetup, machine: Machine, start: int, end: int, has_experts: bool = False) -> LayerTime:
    """The time of the tokens [start, end) of every sequence of a micro-batch, without recomputation."""
    model, device, software = setup.model, machine.device, setup.software
    batch, tensor, context = setup.micro_batch_size, setup.tensor_parallel, setup.context_parallel
    length = end - start
    rows = batch * length / context
    hidden = model.hidden_size
    width = model.num_heads * model.head_dim / tensor
    kv_width = (model.num_kv_heads or model.num_heads) * model.head_dim / tensor
    experts = model.experts if has_experts else None
    ffn = (experts.shared_ffn_hidden_size if experts else model.ffn_hidden_size) / tensor
    fc1 = ffn * (2 if model.is_gated else 1)

    weights = ((width + 2 * kv_width, hidden), (hidden, width), (fc1, hidden), (hidden, ffn))  # outputs, inputs
    forward_matmul = sum(matmul_time(device, rows, out, into) for out, into in weights)
    input_matmul = sum(matmul_time(device, rows, into, out) for out, into in weights)
    # A product that adds to gradients reads and writes them meanwhile.
    adding = moving_time(device, 2 * software.gradient_bytes * setup.layer_parameters(has_experts))
    weight = max(sum(matmul_time(device, out, into, rows) for out, into in weights), adding)

    heads = model.num_heads / tensor / context
    if software.flash_attention:
        pairs = length * (start + end + 1) / 2
        forward_attention = flash_time(device, length, end, pairs, heads, model.head_dim, batch)
        input_attention = flash_time(device, length, end, pairs, heads, model.head_dim, batch, backward=True)
    else:
        sizes = (device, length, end, heads, model.head_dim, batch, software.dropout)
        forward_attention = unfused_attention_time(*sizes, backward=False)
        input_attention = unfused_attention_time(*sizes, backward=True)
    if len(setup.segments) > 1:
        # Keys and values of the prefix: either copied each time, or their gradients are added to sums in 32 bit.
        cached = batch * end / context * 2 * kv_width
        if software.concatenates_prefix:
            forward_attention += moving_time(device, 2 * BYTES * cached, 2)
            input_attention += moving_time(device, 3 * BYTES * cached, 2)
        else:
            input_attention += moving_time(device, (BYTES + 8) * cached, 2)
    # Context parallelism by heads: queries, keys, values and the output change from tokens to heads and back.
    context_exchange = all_to_all_time(machine, setup.context_group, BYTES * rows * (2 * width + 2 * kv_width))

    # Two norms (read, write) and two additions to the residual (read two, write one); then the activation function,
    # rotary positions of queries and keys, and their layout.
    whole = rows * hidden / (tensor if setup.sequence_parallel else 1)
    parts = rows * (fc1 + ffn + 4 * (width + kv_width))
    forward_other = moving_time(device, BYTES * (10 * whole + parts), 10)
    input_other = moving_time(device, BYTES * (14 * whole + 1.5 * parts), 14)

    # A sum over the tensor-parallel ranks each way, for each of two blocks; with sequence parallelism each in its two
    # halves, and the inputs of the block are gathered once more for the weight gradients.
    group, size = setup.tensor_group, BYTES * rows * hidden
    blocks = 2 if ffn else 1
    forward_exchange = input_exchange = blocks * all_reduce_time(machine, group, size)
    gathered = forward_exchange / 2 if setup.sequence_parallel else 0.0
    input_exchange += gathered
    if software.overlaps_tensor_parallel and not setup.splits_backward:
        # With sequence parallelism the gathering runs beside a product, and the reduction beside another.
        input_exchange -= min(forward_exchange, 0.8 * weight)
    routed = expert_time(setup, machine, rows) if experts else NO_EXPERTS
    return LayerTime(
        forward_matmul + routed.matmul,
        forward_attention,
        forward_other + routed.other,
        forward_exchange,
        context_exchange + routed.all_to_all,
        input_matmul + routed.matmul,
        input_attention,
        input_other + 2 * routed.other,
        input_exchange,
        context_exchange + routed.all_to_all,
        weight + routed.weight,
    )


@dataclass(frozen=True)
class EndTime:
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
    """The loss is taken in 32 bit, step by step: about 40 bytes move for each logit forward, 16 backward."""
    device, hidden = machine.device, setup.model.hidden_size
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    columns = setup.model.vocab_size / setup.tensor_parallel
    logits = rows * columns
    once = all_reduce_time(machine, setup.tensor_group, BYTES * rows * hidden)
    forward = matmul_time(device, rows, columns, hidden) + moving_time(device, 40 * logits, 10)
    forward += once / 2 if setup.sequence_parallel else 0.0
    back = matmul_time(device, rows, hidden, columns) + moving_time(device, 16 * logits, 4) + once
    adding = moving_time(device, 2 * setup.software.gradient_bytes * setup.embedding_parameters)
    return EndTime(forward, back, max(matmul_time(device, columns, hidden, rows), adding))
