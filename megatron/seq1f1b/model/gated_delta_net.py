"""Gated delta nets (arXiv 2412.06464) cut into segments.

A segment passes on the state of the recurrence, [b, h, d_k, d_v] in fp32, and the last columns before the convolution.
The kernels are those that Megatron's layer was built with: flash-linear-attention's on GPUs, plain PyTorch in
deterministic mode and on CPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn
from torch import Tensor

from ..patches import Patch, PatchTable, Scope
from .passed_state import State, causal_convolution, run_recurrence


def _forward(
    layer: GatedDeltaNet, of_whole_sequences: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    segment = layer.segment_context.segment
    if segment is None or segment.is_whole_sequence and segment.documents is None:
        return of_whole_sequences(hidden_states, *args, **kwargs)
    projected, _ = layer.in_proj(hidden_states)
    group = layer.pg_collection.cp
    if group.size() > 1:  # with this rank's part of every kind of head, of all tokens of the segment
        sizes = layer.in_proj_split_sections
        projected = projected[..., gdn._build_head_perm_for_split_sections(sizes, group.size(), projected.device)]
        projected = gdn.tensor_a2a_cp2hp(projected, seq_dim=0, head_dim=-1, cp_group=group)
    output = run_recurrence(layer.segment_context, layer, partial(_recurrence, layer), projected)
    return layer.out_proj(common.tensor_a2a_hp2cp(output, seq_dim=0, head_dim=-1, cp_group=group))


FOLLOWS = PatchTable(
    Scope.MODEL,
    (
        Patch(
            "megatron.core.ssm.gated_delta_net.GatedDeltaNet.forward",
            partial(partial, _forward),
            "starts every segment without a state",
            wraps=True,
        ),
    ),
)


def _recurrence(layer: GatedDeltaNet, projected: Tensor, state: State | None) -> tuple[Tensor, State]:
    """From the input projection [n, b, ...] to the normalised output of the rule [n, b, h·d_v]."""
    columns, memory = state or (None, None)
    length, batch, _ = projected.shape
    qkv, gate, beta, alpha = projected.transpose(0, 1).split(layer.feat_dim_split, dim=-1)
    qkv, columns = causal_convolution(partial(_convolve, layer), qkv, columns, layer.conv_kernel_dim)
    query, key, value, gate, beta, alpha = layer._prepare_input_for_gated_delta_rule(
        qkv, gate.unflatten(-1, (-1, layer.value_head_dim)), batch, length, beta, alpha
    )
    log_decay, bias = (
        gdn.get_parameter_local_cp(each, dim=0, cp_group=layer.pg_collection.cp)
        for each in (layer.A_log, layer.dt_bias)
    )
    decay, beta = layer._compute_g_and_beta(log_decay, bias, alpha, beta)
    output, memory = layer.gated_delta_rule(
        query, key, value, g=decay, beta=beta, initial_state=memory, output_final_state=True
    )
    output = layer._apply_gated_norm(output, gate).view(batch, length, -1)
    return output.transpose(0, 1).contiguous(), (columns, memory)


def _convolve(layer: GatedDeltaNet, x: Tensor) -> Tensor:
    """Depthwise, with its activation: [b, n, d] to [b, n, d]."""
    own = {"dim": 0, "cp_group": layer.pg_collection.cp}
    own["split_sections"] = [layer.qk_dim_local_tp, layer.qk_dim_local_tp, layer.v_dim_local_tp]
    weight, bias = layer.conv1d.weight, layer.conv1d.bias
    weight = gdn.get_parameter_local_cp(weight, **own)
    bias = None if bias is None else gdn.get_parameter_local_cp(bias, **own)
    if layer.config.deterministic_mode:
        output = F.conv1d(x.mT, weight, bias, padding=layer.conv_kernel_dim - 1, groups=weight.shape[0])
        return layer.act_fn(output[..., : x.shape[1]]).mT
    output, _ = gdn.causal_conv1d(x=x, weight=weight.squeeze(1), bias=bias, activation=layer.activation)
    return output
