"""The programs that the papers measured, where they compute, keep or send something in another way than this package.

A `PaperSetup` is a set-up of such a program. The functions below take the place of the package's for it.
"""

from dataclasses import dataclass, replace

from megatron.seq1f1b.costs import layer_bytes, layer_times, simulator, stage_times
from megatron.seq1f1b.costs.blocks import BYTES, Block
from megatron.seq1f1b.costs.layer_times import LayerTime
from megatron.seq1f1b.costs.machine import Device, Group, Machine
from megatron.seq1f1b.costs.training_setup import StageLayers, TrainingSetup
from megatron.seq1f1b.schedule import Action, Costs, Kind, Schedule, Timeline

from .blocking import execute_blocking

# Tensors of the size of its input that the backward of GELU has at once where every operation is a kernel of its own:
# the input with its bias, the hyperbolic tangent, its derivative, two factors, what comes in and what goes out.
_UNFUSED_ACTIVATION = 7
_LOGIT_COPIED = 10  # bytes of a logit: in 16 bit, in 32 bit, and its exponential


@dataclass(frozen=True)
class PaperSetup(TrainingSetup):
    """A set-up of a program that may differ from this package; the defaults are those of the package.

    - `flash_attention`: no scores in memory.
    - `overlaps_messages`: ranks compute while messages travel; otherwise both sides of a message wait for it, as in
      Megatron's schedules without --overlap-p2p-communication.
    - `overlaps_tensor_parallel`: collectives of the backward run beside weight gradients.
    - `concatenates_prefix`: keys and values of a segment are joined to copies of those before it, as in the code of
      the authors of Seq1F1B, and not written into one buffer.
    - `gradient_bytes`: the size of a gradient that is summed.
    - `fuses_kernels`: activation functions, rotary positions and the loss are one kernel each, and hold no terms in
      between; softmax that is not fused casts its scores to 32 bit and back.
    - `scatters_messages`: each tensor-parallel rank sends its part of a message (arXiv 2104.04473, section 4.1);
      otherwise one of them sends all, which the receivers broadcast.
    - `adds_gradients_last`: weight gradients are accumulated after the input gradient is sent, as in the code of the
      authors of TeraPipe; modelled as W.
    - `frees_late`: the host runs ahead, and tensors of tensor-parallel collectives stay until the device is done with
      the action (PyTorch before 2.8, unless TORCH_NCCL_AVOID_RECORD_STREAMS is set).
    - `pipeline_before_data`: ranks of a pipeline are nearer to each other than replicas (--use-tp-pp-dp-mapping).
    """

    flash_attention: bool = True
    overlaps_messages: bool = True
    overlaps_tensor_parallel: bool = True
    concatenates_prefix: bool = False
    gradient_bytes: int = 4
    dropout: bool = False
    fuses_kernels: bool = True
    scatters_messages: bool = True
    adds_gradients_last: bool = False
    frees_late: bool = False
    pipeline_before_data: bool = False
    keeps_logits: bool = True

    @property
    def data_group(self) -> Group:
        stride = self.tensor_parallel * (self.pipeline_parallel if self.pipeline_before_data else 1)
        return Group(self.context_parallel * self.data_parallel, stride)

    @property
    def pipeline_stride(self) -> int:
        stride = self.tensor_parallel * self.context_parallel
        return stride if self.pipeline_before_data else stride * self.data_parallel


def _of_package(function):
    """The package's own form of one of its functions."""
    return function.dispatch(TrainingSetup)


@layer_times.layer_time.register
def _(setup: PaperSetup, machine: Machine, start: int, end: int, layer: int = 0) -> LayerTime:
    of_package = _of_package(layer_times.layer_time)
    time = of_package(setup, machine, start, end, layer)
    forward, back = _attention(setup, machine, start, end)
    exchange = time.input.exchange
    if not setup.overlaps_tensor_parallel:
        exchange = time.forward.exchange * (1.5 if setup.sequence_parallel else 1)
    weight = time.weight
    if setup.adds_gradients_last:
        weight = of_package(replace(setup, gradient_bytes=0), machine, start, end, layer).weight
    return LayerTime(
        time.forward._replace(attention=forward), time.input._replace(attention=back, exchange=exchange), weight
    )


def _attention(setup: PaperSetup, machine: Machine, start: int, end: int) -> tuple[float, float]:
    """Attention of the forward and of the input gradients."""
    model = setup.model
    device = machine.device
    batch = setup.micro_batch_size
    length = end - start
    heads = model.num_heads / setup.tensor_parallel / setup.context_parallel
    if setup.flash_attention:
        pairs = length * (start + end + 1) / 2
        sizes = (length, end, pairs, heads * batch, model.head_dim)
        forward, back = (device.flash_time(*sizes, backward) for backward in (False, True))
    else:
        sizes = (device, length, end, heads, model.head_dim, batch, setup.dropout, setup.fuses_kernels)
        forward = unfused_attention_time(*sizes, backward=False)
        back = unfused_attention_time(*sizes, backward=True)
    if len(setup.segments) > 1:
        kv_heads = model.num_kv_heads or model.num_heads
        cached = batch * end / setup.context_parallel * 2 * kv_heads * model.head_dim / setup.tensor_parallel
        if setup.concatenates_prefix:  # the prefix is copied each time
            forward += device.moving_time(2 * BYTES * cached, 2)
            back += device.moving_time(3 * BYTES * cached, 2)
        else:
            back += device.moving_time((BYTES + 8) * cached, 2)
    return forward, back


def unfused_attention_time(
    device: Device,
    queries: int,
    keys: int,
    heads: float,
    head_dim: int,
    batch: int,
    dropout: bool,
    fuses_softmax: bool,
    backward: bool,
) -> float:
    """Attention by two batched matrix products and a kernel for scale, mask and softmax, as in Megatron.

    Without `fuses_softmax` the mask is added by a kernel, the softmax makes numbers in 32 bit, and these are cast.
    """
    count = heads * batch
    scores = BYTES * count * queries * keys
    products = device.matmul_time(queries, keys, head_dim, count) + device.matmul_time(queries, head_dim, keys, count)
    masked = device.moving_time(2.5 * scores, 1) if dropout else 0.0  # the same, and a mask of one byte
    if not backward:
        # A kernel reads and writes the scores; or three do, with 4 bytes between the last two.
        softmax = device.moving_time(2 * scores, 1) if fuses_softmax else device.moving_time(8 * scores, 3)
        return products + softmax + masked
    # Two products for each of the forward; the softmax also reads its result.
    softmax = device.moving_time(3 * scores, 1) if fuses_softmax else device.moving_time(8 * scores, 2)
    return 2 * products + softmax + masked


@stage_times.step_costs.register
def _(setup: PaperSetup, machine: Machine) -> Costs:
    costs = _of_package(stage_times.step_costs)(setup, machine)
    if not setup.scatters_messages:
        there, back = stage_times.message_times(setup, machine, 1)
        costs = replace(costs, message_f=there, message_b=back)
    if setup.adds_gradients_last:
        # The W of the package goes with the backward; what is left is to read two numbers and write one.
        whole = tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(costs.i, costs.w, strict=True))
        size = 3 * setup.gradient_bytes * setup.layer_parameters().dense
        of_layer = machine.device.moving_time(size, 1)
        added = tuple((layers * of_layer,) * len(setup.segments) for layers in setup.layers_per_stage)
        costs = replace(costs, i=whole, w=added)
    return costs


@simulator.timeline_of.register
def _(setup: PaperSetup, machine: Machine, schedule: Schedule, costs: Costs) -> Timeline:
    if setup.adds_gradients_last:
        schedule = _with_additions(schedule)
    if setup.overlaps_messages or setup.pipeline_parallel == 1:
        return _of_package(simulator.timeline_of)(setup, machine, schedule, costs)
    return execute_blocking(schedule, costs)


def _with_additions(schedule: Schedule) -> Schedule:
    """The additions to weight gradients behind each backward."""

    def parts(action: Action) -> tuple[Action, ...]:
        return (action._replace(kind=Kind.I), action._replace(kind=Kind.W)) if action.kind is Kind.B else (action,)

    ranks = (tuple(part for action in actions for part in parts(action)) for actions in schedule.ranks)
    return replace(schedule, ranks=tuple(ranks))


@layer_bytes.layer_activation.register
def _(setup: PaperSetup, layer: int, start: int, end: int) -> float:
    kept = _of_package(layer_bytes.layer_activation)(setup, layer, start, end)
    if setup.recompute == "full":
        return kept
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    blocks = setup.model.blocks(layer)
    if setup.dropout:  # the mask of the one behind each block
        kept += len(blocks) * rows * setup.model.hidden_size / setup.token_shares
    if "*" in blocks and not setup.fuses_kernels:
        kept += rows * 4 * BYTES * setup.model.head_dim  # cosines and sines for queries and for keys, on every rank
    if "*" in blocks and not setup.flash_attention:
        # No log-sum-exp, but the scores, their softmax and the mask of its dropout.
        a_head = (0 if setup.recompute == "core_attn" else 5 * end) - 4
        kept += a_head * rows * setup.model.num_heads / setup.tensor_parallel
    return kept


@layer_bytes.layer_keys_values.register
def _(setup: PaperSetup, layer: int, start: int, end: int) -> float:
    if len(setup.segments) == 1 or not setup.concatenates_prefix:
        return _of_package(layer_bytes.layer_keys_values)(setup, layer, start, end)
    # Its own; and the copy for all, until the first segment goes backward.
    tokens = end - start + (0 if start else setup.sequence_length)
    return BYTES * layer_bytes.keys_values_of(setup, layer, tokens)


@layer_bytes.layer_keys_values_gradients.register
def _(setup: PaperSetup, layer: int) -> float:
    if len(setup.segments) == 1 or not setup.concatenates_prefix:
        return _of_package(layer_bytes.layer_keys_values_gradients)(setup, layer)
    return BYTES * layer_bytes.keys_values_of(setup, layer, setup.sequence_length)


@layer_bytes.loss_bytes.register
def _(setup: PaperSetup, length: int, is_forward: bool = True) -> float:
    if is_forward and not setup.fuses_kernels:
        return _LOGIT_COPIED * layer_bytes.logits(setup, length)
    return _of_package(layer_bytes.loss_bytes)(setup, length, is_forward)


@layer_bytes.backward_working.register
def _(setup: PaperSetup, stage: StageLayers, start: int, end: int) -> float:
    most = _of_package(layer_bytes.backward_working)(setup, stage, start, end)
    if setup.frees_late and setup.token_shares > 1:
        # Of each layer stay two gathered gradients of outputs and two gradients of gathered inputs, while what the
        # layer kept is freed.
        for layer, count in stage.layers:
            stays = 4 * setup.whole_input(end - start)
            most += count * max(0.0, stays - layer_bytes.layer_activation(setup, layer, start, end))
    return most


@layer_bytes.block_working.register
def _(setup: PaperSetup, layer: int, block: Block, start: int, end: int) -> float:
    model = setup.model
    rows = setup.rows(end - start)
    if block.attention is None and not setup.fuses_kernels:
        into = BYTES * (2 if model.is_gated else 1) * model.ffn_hidden_size
        return _UNFUSED_ACTIVATION * rows * into / setup.tensor_parallel
    held = _of_package(layer_bytes.block_working)(setup, layer, block, start, end)
    if block.attention is not None and not setup.flash_attention:
        # Scores, their softmax and the mask of its dropout, if they are computed again; and gradients of both.
        bytes_of_score = 2 * BYTES + (5 if setup.recompute == "core_attn" else 0)
        of_heads = (bytes_of_score * end / setup.context_parallel - 4) * rows * model.num_heads
        held += of_heads / setup.tensor_parallel
    return held
