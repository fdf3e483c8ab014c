"""Mamba-2 layers (arXiv 2405.21060) cut into segments.

A segment passes on the state of the scan, [b, h, p, n] in fp32, and the last columns before the convolution. Megatron's
fused training path takes no state, so the convolution and the scan are called apart: mamba-ssm's and causal-conv1d's
kernels on GPUs, plain PyTorch on CPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from ..patches import Patch, PatchTable, Scope
from .passed_state import State, causal_convolution, run_recurrence


def _scan(
    mixer: MambaMixer, of_whole_sequences: Callable[..., Tensor], projected: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    segment = mixer.segment_context.segment
    if segment is None or segment.is_whole_sequence and segment.documents is None:
        return of_whole_sequences(projected, *args, **kwargs)
    output = run_recurrence(mixer.segment_context, mixer, partial(_recurrence, mixer), projected)
    output = mixer.cp.post_conv_ssm(output)
    if not mixer.rmsnorm:
        return output
    gate = projected[..., : mixer.cp.d_inner_local_tpcp].contiguous()
    return mixer.norm(output, mixer.cp.post_conv_ssm(gate))


# Megatron's methods from the input projection to the input of the output projection, with and without its fused path.
FOLLOWS = PatchTable(
    Scope.MODEL,
    tuple(
        Patch(
            f"megatron.core.ssm.mamba_mixer.MambaMixer.{method}",
            partial(partial, _scan),
            "starts every segment without a state",
            wraps=True,
        )
        for method in ("_ssm_training", "_ssm_prefill")
    ),
)


def _recurrence(mixer: MambaMixer, projected: Tensor, state: State | None) -> tuple[Tensor, State]:
    """From the input projection [n, b, ...] to the output of the scan [n, b, h·p]; with context parallelism, of all
    tokens of a segment with this rank's heads, between Megatron's two exchanges."""
    columns, memory = state or (None, None)
    own = mixer.cp
    width, groups = own.d_inner_local_tpcp, own.ngroups_local_tpcp * mixer.d_state
    gate, mixed, step = projected.transpose(0, 1).split([width, width + 2 * groups, own.nheads_local_tpcp], dim=-1)
    mixed, columns = causal_convolution(partial(_convolve, mixer), mixed, columns, mixer.d_conv)
    x, b, c = mixed.split([width, groups, groups], dim=-1)
    output, memory = mamba_mixer.mamba_chunk_scan_combined(
        _by_head(x, mixer.headdim),
        step.contiguous(),
        -own.get_A_log().float().exp(),
        _by_head(b, mixer.d_state),
        _by_head(c, mixer.d_state),
        mixer.chunk_size,
        D=own.get_D().float().unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else own.get_D(),
        z=None if mixer.rmsnorm else _by_head(gate, mixer.headdim),
        dt_bias=own.get_dt_bias().float(),
        dt_softplus=True,
        initial_states=memory,
        return_final_states=True,
        **({"state_dtype": mixer.mamba_training_ssm_states_dtype} if mamba_mixer.MAMBA_HAS_STATE_DTYPE else {}),
    )
    return output.flatten(2).transpose(0, 1).contiguous(), (columns, memory)


def _convolve(mixer: MambaMixer, x: Tensor) -> Tensor:
    """Depthwise, with its activation: [b, n, d] to [b, n, d]."""
    weight, bias = mixer.cp.get_conv1d_weight().squeeze(1), mixer.cp.get_conv1d_bias()
    return mamba_mixer.causal_conv1d_fn(x=x.mT.contiguous(), weight=weight, bias=bias, activation=mixer.activation).mT


def _by_head(x: Tensor, size: int) -> Tensor:
    """[b, n, h·d] to [b, n, h, d]."""
    return x.unflatten(-1, (-1, size)).contiguous()
