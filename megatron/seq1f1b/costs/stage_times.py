"""How long the actions of a training step take on a machine: kernel by kernel, collective by collective. Seconds.

A layer is one of a GPT in the order of Megatron: norm, projections of query, key and value, attention, output
projection, norm, feed-forward block. FLOPs follow arXiv 2104.04473, section 3.4; what tensor and sequence parallelism
exchange follows arXiv 2205.05198, section 4.2.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from ..schedule import Costs, Placement
from .collectives import all_gather_time, all_reduce_time, all_to_all_time, message_time
from .kernels import BYTES, flash_time, matmul_time, moving_time, unfused_attention_time
from .machine import Machine
from .training_setup import TrainingSetup


@dataclass(frozen=True)
class LayerTime:
    """Of one segment on one layer; the parts of a direction by what they go to. Seconds on the device.

    `forward_*` are parts of the forward; `input_*` of the input gradients; `weight` are the weight gradients.
    `exchange` is what tensor parallelism does not hide.
    """

    forward_matmul: float
    forward_attention: float
    forward_other: float
    forward_exchange: float
    input_matmul: float
    input_attention: float
    input_other: float
    input_exchange: float
    weight: float

    @property
    def forward(self) -> float:
        return self.forward_matmul + self.forward_attention + self.forward_other + self.forward_exchange

    @property
    def input(self) -> float:
        return self.input_matmul + self.input_attention + self.input_other + self.input_exchange


def layer_time(setup: TrainingSetup, machine: Machine, start: int, end: int) -> LayerTime:
    """Of the segment of the tokens [start, end) of every sequence of a micro-batch, without recomputation."""
    model, device, software = setup.model, machine.device, setup.software
    batch, tensor, context = setup.micro_batch_size, setup.tensor_parallel, setup.context_parallel
    length = end - start
    rows = batch * length / context
    hidden = model.hidden_size
    width = model.num_heads * model.head_dim / tensor
    kv_width = (model.num_kv_heads or model.num_heads) * model.head_dim / tensor
    ffn = model.ffn_hidden_size / tensor
    fc1 = ffn * (2 if model.is_gated else 1)

    weights = ((width + 2 * kv_width, hidden), (hidden, width), (fc1, hidden), (hidden, ffn))  # outputs, inputs
    forward_matmul = sum(matmul_time(device, rows, out, into) for out, into in weights)
    input_matmul = sum(matmul_time(device, rows, into, out) for out, into in weights)
    # A product that adds to gradients reads and writes them meanwhile.
    adding = moving_time(device, 2 * software.gradient_bytes * setup.layer_parameters)
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
    if context > 1:
        # By heads: queries, keys, values and the output change from tokens to heads and back.
        exchanged = BYTES * rows * (2 * width + 2 * kv_width)
        forward_attention += all_to_all_time(machine, setup.context_group, exchanged)
        input_attention += all_to_all_time(machine, setup.context_group, exchanged)

    # Two norms (read, write) and two additions to the residual (read two, write one); then the activation function,
    # rotary positions of queries and keys, and their layout.
    whole = rows * hidden / (tensor if setup.sequence_parallel else 1)
    parts = rows * (fc1 + ffn + 4 * (width + kv_width))
    forward_other = moving_time(device, BYTES * (10 * whole + parts), 10)
    input_other = moving_time(device, BYTES * (14 * whole + 1.5 * parts), 14)

    # Two sums over the tensor-parallel ranks each way; with sequence parallelism each in its two halves, and the inputs
    # of two products are gathered once more for the weight gradients.
    group, size = setup.tensor_group, BYTES * rows * hidden
    once = all_reduce_time(machine, group, size)
    forward_exchange = input_exchange = 2 * once
    if software.overlaps_tensor_parallel and not setup.splits_backward:
        if setup.sequence_parallel:
            hidden_part = once + once  # the gathering beside a product, and the reduction beside another
            input_exchange += once
        else:
            hidden_part = 2 * once
        input_exchange -= min(hidden_part, 0.8 * weight)
    elif setup.sequence_parallel:
        input_exchange += once
    return LayerTime(
        forward_matmul,
        forward_attention,
        forward_other,
        forward_exchange,
        input_matmul,
        input_attention,
        input_other,
        input_exchange,
        weight,
    )


@dataclass(frozen=True)
class EndTime:
    """Of the embedding or of the projection to the vocabulary with the loss, for one segment."""

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


Row = tuple[float, ...]


@lru_cache(maxsize=4096)
def _parts(setup: TrainingSetup, machine: Machine) -> tuple[tuple[LayerTime, EndTime, EndTime], ...]:
    """Of a layer, the embedding and the head, by segment."""
    spans = pairwise(accumulate(setup.segments, initial=0))
    return tuple(
        (
            layer_time(setup, machine, *span),
            embedding_time(setup, machine, *span),
            head_time(setup, machine, *span),
        )
        for span in spans
    )


@lru_cache(maxsize=8192)
def _rows(setup: TrainingSetup, machine: Machine, layers: int, first: bool, last: bool) -> tuple[Row, Row, Row]:
    host = machine.host
    row_f, row_i, row_w = [], [], []
    for layer, embedding, head in _parts(replace(setup, recompute="none"), machine):
        forward, back, weight = layers * layer.forward, layers * layer.input, layers * layer.weight
        repeated = {"none": 0.0, "selective": layers * layer.forward_attention, "full": forward}[setup.recompute]
        for end, there in ((embedding, first), (head, last)):
            if there:
                forward += end.forward
                back += end.input
                weight += end.weight
        launch_f = layers * host.layer_forward
        launch_b = layers * host.layer_backward + (launch_f if setup.recompute == "full" else 0.0)
        total = max(back + weight + repeated, launch_b) + host.action
        weight *= (total - host.action) / (back + weight + repeated) if setup.splits_backward else 1.0
        row_f.append(max(forward, launch_f) + host.action)
        row_i.append(total - weight)
        row_w.append(weight)
    return tuple(row_f), tuple(row_i), tuple(row_w)


def stage_rows(setup: TrainingSetup, machine: Machine) -> list[tuple[Row, Row, Row]]:
    """For every stage, durations of F, I and W by segment. Seconds."""
    # Whatever does not matter on a single stage is the same for all, so that few set-ups are computed.
    alone = replace(
        setup,
        num_microbatches=1,
        data_parallel=1,
        placement=Placement(1),
        layers_per_stage=(setup.model.num_layers,),
        family="zb-h1" if setup.splits_backward else "1f1b",
    )
    last = setup.placement.num_stages - 1
    kinds = [(layers, stage == 0, stage == last) for stage, layers in enumerate(setup.layers_per_stage)]
    rows = {kind: _rows(alone, machine, *kind) for kind in set(kinds)}
    return [rows[kind] for kind in kinds]


@lru_cache(maxsize=256)
def step_costs(setup: TrainingSetup, machine: Machine) -> Costs:
    """Durations of F, I and W and of the messages, by stage and segment, in seconds; memory in bytes is in `memory`."""
    from .memory import activation_tables

    f, i, w = zip(*stage_rows(setup, machine), strict=True)
    messages = message_times(setup, machine)
    activation, kept = activation_tables(setup)
    return Costs(f, i, w, messages[0], messages[1], activation, kept)


def message_times(setup: TrainingSetup, machine: Machine) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """From a stage to the next, and back to the one before: by stage and segment.

    Every tensor-parallel rank sends its part; without sequence parallelism the receivers gather the parts.
    """
    tables = []
    stages = setup.placement.num_stages
    for step in (1, -1):
        table = []
        for stage in range(stages):
            row = []
            for length in setup.segments:
                rows = setup.micro_batch_size * length / setup.context_parallel
                size = BYTES * rows * setup.model.hidden_size
                there = stage + step
                if not 0 <= there < stages:
                    row.append(0.0)
                    continue
                source, destination = (setup.placement.rank_of(each) * setup.pipeline_stride for each in (stage, there))
                senders = min(machine.devices_per_node, setup.pipeline_stride)
                time = message_time(machine, source, destination, size / setup.tensor_parallel, senders)
                if not setup.sequence_parallel:
                    time += all_gather_time(machine, setup.tensor_group, size)
                row.append(time)
            table.append(tuple(row))
        tables.append(tuple(table))
    return tuple(tables)


def replica_times(setup: TrainingSetup, machine: Machine, parameters: float) -> tuple[float, float]:
    """To sum the gradients of so many parameters over the ranks that hold the same, and to gather the parameters where
    the optimizer state is sharded."""
    group, gradients = setup.data_group, setup.software.gradient_bytes * parameters
    if setup.distributed_optimizer:
        return all_gather_time(machine, group, gradients), all_gather_time(machine, group, BYTES * parameters)
    return all_reduce_time(machine, group, gradients), 0.0


@dataclass(frozen=True)
class StepEnd:
    """What follows the pipeline, on the ranks of one pipeline rank."""

    reduce: float
    update: float
    gather: float


def step_end(setup: TrainingSetup, machine: Machine, rank: int) -> StepEnd:
    """Summing gradients over the data-parallel ranks, Adam, and gathering the parameters where the state is sharded.

    With `overlaps_data_parallel` the first and the last are part of the schedule, but for tied embeddings.
    """
    stages = setup.placement.stages_of(rank)
    parameters = sum(setup.stage_parameters(stage) for stage in stages)
    software = setup.software
    reduce, gather = (0.0, 0.0) if software.overlaps_data_parallel else replica_times(setup, machine, parameters)
    ends = (0, setup.placement.num_stages - 1)
    if setup.tied_embeddings and setup.placement.num_stages > 1 and any(stage in ends for stage in stages):
        apart = setup.pipeline_stride * (setup.pipeline_parallel - 1)
        size = software.gradient_bytes * setup.embedding_parameters
        reduce += 2 * message_time(machine, 0, apart, size, min(machine.devices_per_node, setup.pipeline_stride))
    share = setup.data_group.size if setup.distributed_optimizer else 1
    # Gradients: cleared, scaled and measured by all; then parameter, two moments, gradient and copy in 16 bit.
    moved = 4 * software.gradient_bytes * parameters + (24 + software.gradient_bytes + BYTES) * parameters / share
    return StepEnd(reduce, moving_time(machine.device, moved, 20), gather)
