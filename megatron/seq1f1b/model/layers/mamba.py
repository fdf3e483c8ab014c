"""Mamba-2 (arXiv 2405.21060) by segments, on the kernels of Megatron's layer.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from ...process.megatron_versions import scan_of_mamba
from ...process.patches import wrapping
from .recurrent import State, causal_convolution, run_recurrence


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
    skip = own.get_D()
    if mixer.D_has_hdim:
        skip = skip.float().unflatten(0, (-1, mixer.headdim))
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
        D=skip,
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
    # Between the input and the output projection, with and without Megatron's fused path.
    wrapping("megatron.core.ssm.mamba_mixer.MambaMixer._ssm_training", _mamba, _REASON),
    wrapping(scan_of_mamba(), _mamba, _REASON),
)
