"""How much memory a training step takes on a device. Bytes.

Activations follow arXiv 2205.05198, section 4 (34 bytes per token and hidden unit of a layer, and five per score where
scores are stored), gradients and states Megatron's mixed precision with Adam.
"""

from dataclasses import dataclass, replace

from ..schedule import Kind, Schedule
from ..schedule.costs import Table
from .kernels import BYTES
from .training_setup import TrainingSetup

GIB = 2**30
# The backward of a layer holds gradients beside activations: about as much as one and a half layers.
_WORKING_BYTES = 51
# A logit in 16 bit, in 32 bit, and its exponential; the last is kept for the backward.
_LOGIT_BYTES, _LOGIT_BYTES_KEPT = 12, 4
# What the allocator reserves, relative to the peak of what is allocated: with blocks of equal size, and of many.
_RESERVED_EQUAL, _RESERVED_UNEQUAL = 1.06, 1.2


@dataclass(frozen=True)
class Memory:
    """The memory of one rank at the moment of its peak, by use. Bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    keys_values: float
    logits: float
    working: float
    messages: float
    reserved: float  # unused, but not given back

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


def layer_activation(setup: TrainingSetup, start: int, end: int, has_experts: bool = False) -> float:
    """What the forward of one layer keeps for the backward of the segment [start, end), keys and values apart."""
    model, tensor = setup.model, setup.tensor_parallel
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    hidden = model.hidden_size
    whole = rows * hidden / (tensor if setup.sequence_parallel else 1)
    if setup.recompute == "full":
        return 2 * rows * hidden / (tensor if setup.sequence_parallel else 1)
    width = model.num_heads * model.head_dim
    experts = model.experts if has_experts else None
    ffn = experts.shared_ffn_hidden_size if experts else model.ffn_hidden_size
    inner = (2 if model.is_gated else 1) + 1  # what goes into the activation function, and what comes out
    # Norms and inputs of products 8, masks of dropout 2; queries 2, attention's output 2; feed-forward block.
    kept = (10 if setup.software.dropout else 8) * whole + rows * (4 * width + 2 * inner * ffn) / tensor
    if experts:
        # What is sent to the experts, what they compute from it, and what they return.
        kept += rows / tensor * experts.active * BYTES * (2 * hidden + inner * experts.ffn_hidden_size)
    if setup.software.flash_attention:
        return kept + 4 * rows * model.num_heads / tensor
    if setup.recompute != "selective":
        kept += 5 * rows * end * model.num_heads / tensor
    return kept


def layer_keys_values(setup: TrainingSetup, start: int, end: int) -> float:
    """Keys and values that are kept for the segment, with the copies that some software makes of the prefix."""
    if setup.recompute == "full" and len(setup.segments) == 1:
        return 0.0
    kv_heads = (setup.model.num_kv_heads or setup.model.num_heads) / setup.tensor_parallel
    kv_width = kv_heads * setup.model.head_dim
    # Context-parallel ranks share heads; more ranks than KV heads have one each.
    shares = min(setup.context_parallel, max(1, kv_heads))
    tokens = end if setup.software.concatenates_prefix and len(setup.segments) > 1 else end - start
    return 2 * BYTES * kv_width * setup.micro_batch_size * tokens / shares


def activation_tables(setup: TrainingSetup) -> tuple[Table, Table]:
    """`activation` and `kept` of `Costs`, in bytes."""
    rows = []
    last = setup.placement.num_stages - 1
    for stage, count in enumerate(setup.layers_per_stage):
        row, start = [], 0
        for length in setup.segments:
            end = start + length
            held = _stage_activation(setup, stage, start, end) + count * layer_keys_values(setup, start, end)
            if stage == last:
                held += _LOGIT_BYTES_KEPT * _logits(setup, length)
            row.append(held)
            start = end
        rows.append(tuple(row))
    table = tuple(rows)
    return table, table


def _stage_activation(setup: TrainingSetup, stage: int, start: int, end: int) -> float:
    dense, sparse = setup.stage_layers[stage]
    held = dense * layer_activation(setup, start, end)
    return held + (sparse * layer_activation(setup, start, end, has_experts=True) if sparse else 0.0)


def static_memory(setup: TrainingSetup, rank: int) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of a rank: what no schedule changes."""
    stages = setup.placement.stages_of(rank)
    parameters = sum(setup.stage_parameters(stage) for stage in stages)
    experts = sum(setup.stage_expert_parameters(stage) for stage in stages)
    share, expert_share = (
        group.size if setup.distributed_optimizer else 1 for group in (setup.data_group, setup.expert_data_group)
    )
    optimizer = 12 * (parameters / share + experts / expert_share)
    return BYTES * (parameters + experts), setup.software.gradient_bytes * (parameters + experts), optimizer


def rank_memory(setup: TrainingSetup, schedule: Schedule, rank: int) -> Memory:
    """The memory of a rank when its activations are at their peak."""
    placement = setup.placement
    stages = placement.stages_of(rank)
    activation, _ = activation_tables(setup)
    held: dict[tuple[int, int, int], int] = {}
    now = peak = 0.0
    at_peak: list[tuple[int, int]] = []
    for kind, stage, microbatch, segment in schedule.ranks[rank]:
        if kind is Kind.F:
            held[stage, microbatch, segment] = 1
            now += activation[stage][segment]
            if now > peak:
                peak, at_peak = now, [(stage, segment) for stage, _, segment in held]
        elif kind in (Kind.B, Kind.W):
            del held[stage, microbatch, segment]
            now -= activation[stage][segment]
    ends = [sum(setup.segments[: index + 1]) for index in range(len(setup.segments))]
    keys_values = logits = activations = 0.0
    for stage, segment in at_peak:
        span = ends[segment] - setup.segments[segment], ends[segment]
        keys_values += setup.layers_per_stage[stage] * layer_keys_values(setup, *span)
        activations += _stage_activation(setup, stage, *span)
        if stage == placement.num_stages - 1:
            logits += _LOGIT_BYTES_KEPT * _logits(setup, setup.segments[segment])
    longest = max(setup.segments)
    rows = setup.micro_batch_size * longest / setup.context_parallel
    share = setup.model.hidden_size * rows
    parallel = setup.tensor_parallel if setup.sequence_parallel else 1
    working = _WORKING_BYTES * share
    if setup.recompute == "full":
        working += layer_activation_without_recomputation(setup, max(setup.segments))
    if placement.num_stages - 1 in stages:
        logits += (_LOGIT_BYTES - _LOGIT_BYTES_KEPT) * _logits(setup, longest)
    if len(setup.segments) > 1:
        # Gradients of keys and values of one micro-batch, in 32 bit.
        kv = (setup.model.num_kv_heads or setup.model.num_heads) * setup.model.head_dim / setup.tensor_parallel
        tokens = setup.micro_batch_size * setup.sequence_length / setup.context_parallel
        width = BYTES if setup.software.concatenates_prefix else 4
        keys_values += 2 * width * kv * tokens * max(setup.layers_per_stage[stage] for stage in stages)
    messages = 4 * BYTES * share / parallel if setup.pipeline_parallel > 1 else 0.0

    weights, gradients, optimizer = static_memory(setup, rank)
    unequal = len(set(setup.segments)) > 1
    dynamic = activations + keys_values + logits + working + messages
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        keys_values=keys_values,
        logits=logits,
        working=working,
        messages=messages,
        reserved=((_RESERVED_UNEQUAL if unequal else _RESERVED_EQUAL) - 1) * dynamic,
    )


def layer_activation_without_recomputation(setup: TrainingSetup, length: int) -> float:
    span = setup.sequence_length - length, setup.sequence_length
    return layer_activation(replace(setup, recompute="none"), *span, has_experts=setup.model.experts is not None)


def _logits(setup: TrainingSetup, length: int) -> float:
    return setup.micro_batch_size * length / setup.context_parallel * setup.model.vocab_size / setup.tensor_parallel
