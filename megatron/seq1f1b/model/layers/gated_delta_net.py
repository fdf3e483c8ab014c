"""Gated delta nets (arXiv 2412.06464) by segments, on the kernels of Megatron's layer.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn
from torch import Tensor

from ...process.megatron_versions import delta_rule_inputs
from ...process.patches import wrapping
from .recurrent import State, causal_convolution, run_recurrence


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


SEGMENT_PATCHES = (
    wrapping(
        "megatron.core.ssm.gated_delta_net.GatedDeltaNet.forward", _delta_net, "starts every segment without a state"
    ),
)
