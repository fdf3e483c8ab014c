"""Recurrent layers by segments: gated delta nets (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060).

A segment starts from the state after the previous segment, and its backward returns the gradient of that state: that of
the recurrence in fp32, [b, h, d_k, d_v] or [b, h, p, n], and the last input columns of the convolution. A layer
provides one function, from its input and a state to its output and the next state, on the kernels of Megatron's layers.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...process.megatron_versions import delta_rule_inputs, scan_of_mamba
from ...process.patches import wrapping
from ..carried import Carried
from ..packed_documents import pieces
from ..segment import Segment, SegmentContext

State = tuple[Tensor, ...]  # [b, ...] for b sequences
# From an input [n, b, ...] and the state before it, None at the start of a sequence, to output and next state.
Recurrence = Callable[[Tensor, State | None], tuple[Tensor, State]]


def run_recurrence(context: SegmentContext, layer: Any, recurrence: Recurrence, inputs: Tensor) -> Tensor:
    """The output [n, b, ...] of `recurrence` for the running segment's inputs [n, b, ...]. Documents start without a
    state. The state after a segment is a leaf in the graph of the next one, and lives until the segment's backward."""
    segment = context.running_segment
    if segment.is_whole_sequence:
        return _within_documents(recurrence, inputs, None, segment)[0]
    states: States = context.carried(layer, States)
    output, state = _within_documents(recurrence, inputs, states.after(segment.index - 1), segment)
    if not segment.is_last:
        states.keep(segment.index, state, context.has_backward(output))
    context.end_forward(layer, output)
    if segment.is_last:
        return output
    take = partial(states.take, segment.index)
    return _Leave.apply(output, take, context.at_end_of_backward(layer), *state)


class States(Carried):
    """The state of a layer after each segment, by its number, until that segment's backward."""

    def __init__(self) -> None:
        self._after: dict[int, State] = {}

    def after(self, index: int) -> State | None:
        """None before the first segment."""
        return self._after.get(index)

    def keep(self, index: int, state: State, has_backward: bool) -> None:
        """Keep the state after a segment. A repeated forward does not replace the first, which is in the next segment's
        graph."""
        self._after.setdefault(index, tuple(x.detach().requires_grad_(has_backward) for x in state))

    def take(self, index: int) -> State:
        return self._after.pop(index)

    def tensors(self) -> Iterable[Tensor]:
        return chain.from_iterable(self._after.values())

    def end_forward(self, has_graph: bool, has_backward: bool) -> None:
        if not has_backward:  # the next segment reads the latest state only
            latest = max(self._after)
            self._after = {latest: self._after[latest]}


class _Leave(torch.autograd.Function):
    """The output, unchanged; its backward removes the leaves of the state, and passes their gradients on."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, take: Callable[[], State], end: Callable, *state: Tensor) -> Tensor:
        ctx.take = take
        ctx.end = end
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        grads = [x.grad for x in ctx.take()]
        ctx.end()
        return grad_output, None, None, *grads


def _within_documents(
    recurrence: Recurrence, inputs: Tensor, state: State | None, segment: Segment
) -> tuple[Tensor, State]:
    """The output and the state after a segment; documents that end in it pass nothing on."""
    if segment.documents is None:
        return recurrence(inputs, state)
    outputs = []
    states = []
    for sequence, starts in enumerate(segment.documents):
        of_sequence = slice(sequence, sequence + 1)
        found = []
        for piece in pieces(starts, segment.start, segment.end):
            tokens = slice(piece.start - segment.start, piece.end - segment.start)
            before = None
            if state is not None and piece.first_key < segment.start:
                before = tuple(x[of_sequence] for x in state)
            output, after = recurrence(inputs[tokens, of_sequence], before)
            found.append(output)
        outputs.append(torch.cat(found))
        states.append(after)
    return torch.cat(outputs, 1), tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def causal_convolution(
    convolve: Callable[[Tensor], Tensor], x: Tensor, before: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """A causal convolution over `width` tokens of x [b, n, d] and the columns [b, width − 1, d] before it, zeros if
    they are None, and the last columns, from which the next segment starts. `convolve` pads with zeros in front."""
    if before is None:
        before = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    x = torch.cat([before, x], 1)
    # A copy: a view would keep the whole segment alive.
    return convolve(x)[:, width - 1 :], x[:, x.shape[1] - width + 1 :].contiguous()


def _delta_net(
    layer: GatedDeltaNet, of_whole_sequences: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    segment = layer.segment_context.segment
    if segment is None or (segment.is_whole_sequence and segment.documents is None):
        return of_whole_sequences(hidden_states, *args, **kwargs)
    projected, _ = layer.in_proj(hidden_states)
    group = layer.pg_collection.cp
    if group.size() > 1:  # all tokens of the segment, with this rank's part of every kind of head
        sizes = layer.in_proj_split_sections
        heads = common._build_head_perm_for_split_sections(sizes, group.size(), projected.device)
        projected = projected.index_select(-1, heads)
        projected = common.tensor_a2a_cp2hp(projected, seq_dim=0, head_dim=-1, cp_group=group)
    output = run_recurrence(layer.segment_context, layer, partial(_delta_rule, layer), projected)
    return layer.out_proj(common.tensor_a2a_hp2cp(output, seq_dim=0, head_dim=-1, cp_group=group))


def _delta_rule(layer: GatedDeltaNet, projected: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Maps the input projection [n, b, ...] to the normalised output of the rule [n, b, h·d_v]."""
    own = partial(gdn.get_parameter_local_cp, dim=0, cp_group=layer.pg_collection.cp)

    def convolve(x: Tensor) -> Tensor:
        sizes = [layer.qk_dim_local_tp, layer.qk_dim_local_tp, layer.v_dim_local_tp]
        bias = layer.conv1d.bias
        weight = own(layer.conv1d.weight, split_sections=sizes)
        bias = None if bias is None else own(bias, split_sections=sizes)
        if layer.config.deterministic_mode:
            output = F.conv1d(x.mT, weight, bias, padding=layer.conv_kernel_dim - 1, groups=weight.shape[0])
            return layer.act_fn(output[..., : x.shape[1]]).mT
        return gdn.causal_conv1d(x=x, weight=weight.squeeze(1), bias=bias, activation=layer.activation)[0]

    columns, memory = state or (None, None)
    length, batch, _ = projected.shape
    qkv, gate, beta, alpha = projected.transpose(0, 1).split(layer.feat_dim_split, dim=-1)
    qkv, columns = causal_convolution(convolve, qkv, columns, layer.conv_kernel_dim)
    inputs = delta_rule_inputs(
        layer,
        qkv,
        gate=gate.unflatten(-1, (-1, layer.value_head_dim)),
        beta=beta,
        alpha=alpha,
        decay_log=own(layer.A_log),
        decay_bias=own(layer.dt_bias),
    )
    output, memory = layer.gated_delta_rule(
        inputs.query,
        inputs.key,
        inputs.value,
        g=inputs.decay,
        beta=inputs.beta,
        initial_state=memory,
        output_final_state=True,
    )
    output = layer._apply_gated_norm(output, inputs.gate).view(batch, length, -1)
    return output.transpose(0, 1).contiguous(), (columns, memory)


def _mamba(
    mixer: MambaMixer, of_whole_sequences: Callable[..., Tensor], projected: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Megatron's fused training path takes no state, so convolution and scan are called separately."""
    segment = mixer.segment_context.segment
    if segment is None or (segment.is_whole_sequence and segment.documents is None):
        return of_whole_sequences(projected, *args, **kwargs)
    output = run_recurrence(mixer.segment_context, mixer, partial(_mamba_scan, mixer), projected)
    output = mixer.cp.post_conv_ssm(output)
    if not mixer.rmsnorm:
        return output
    gate = projected[..., : mixer.cp.d_inner_local_tpcp].contiguous()
    return mixer.norm(output, mixer.cp.post_conv_ssm(gate))


def _mamba_scan(mixer: MambaMixer, projected: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Maps the input projection [n, b, ...] to the output of the scan [n, b, h·p]. With context parallelism it runs
    between Megatron's two exchanges, on all tokens of a segment with this rank's heads."""
    own = mixer.cp

    def convolve(x: Tensor) -> Tensor:
        weight = own.get_conv1d_weight().squeeze(1)
        bias = own.get_conv1d_bias()
        return mamba_mixer.causal_conv1d_fn(x.mT.contiguous(), weight, bias, activation=mixer.activation).mT

    def by_head(x: Tensor, size: int) -> Tensor:
        return x.unflatten(-1, (-1, size)).contiguous()

    columns, memory = state or (None, None)
    options = {}
    if mamba_mixer.MAMBA_HAS_STATE_DTYPE:
        options["state_dtype"] = mixer.mamba_training_ssm_states_dtype
    width = own.d_inner_local_tpcp
    groups = own.ngroups_local_tpcp * mixer.d_state
    gate, mixed, step = projected.transpose(0, 1).split([width, width + 2 * groups, own.nheads_local_tpcp], dim=-1)
    mixed, columns = causal_convolution(convolve, mixed, columns, mixer.d_conv)
    x, b, c = mixed.split([width, groups, groups], dim=-1)
    output, memory = mamba_mixer.mamba_chunk_scan_combined(
        by_head(x, mixer.headdim),
        step.contiguous(),
        -own.get_A_log().float().exp(),
        by_head(b, mixer.d_state),
        by_head(c, mixer.d_state),
        mixer.chunk_size,
        D=own.get_D().float().unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else own.get_D(),
        z=None if mixer.rmsnorm else by_head(gate, mixer.headdim),
        dt_bias=own.get_dt_bias().float(),
        dt_softplus=True,
        initial_states=memory,
        return_final_states=True,
        **options,
    )
    return output.flatten(2).transpose(0, 1).contiguous(), (columns, memory)


_REASON = "starts every segment without a state"
SEGMENT_PATCHES = (
    wrapping("megatron.core.ssm.gated_delta_net.GatedDeltaNet.forward", _delta_net, _REASON),
    # Between the input and the output projection, with and without Megatron's fused path.
    wrapping("megatron.core.ssm.mamba_mixer.MambaMixer._ssm_training", _mamba, _REASON),
    wrapping(scan_of_mamba(), _mamba, _REASON),
)
