"""The kernels of flash-linear-attention, mamba-ssm and causal-conv1d in plain PyTorch, under their names and arguments,
in the type of their inputs, at least in fp32.

Tested in model/test_recurrent.py.
"""

from types import MappingProxyType

import torch
import torch.nn.functional as F

from ..process.megatron_versions import scan_of_mamba
from ..process.patches import owner_of

_CHUNK = 64


class GatedRMSNorm(torch.nn.Module):
    """Megatron's `ExtendedRMSNorm`: x · silu(z), normalised in groups of `group_size`, times the weight."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=False, device=None, dtype=None):
        super().__init__()
        assert not norm_before_gate, "Megatron's layers gate before they normalise"
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x, z=None):
        dtype = x.dtype
        x, weight = (y.to(torch.promote_types(dtype, torch.float32)) for y in (x, self.weight))
        if z is not None:
            x = x * F.silu(z.to(x.dtype))
        groups = F.rms_norm(x.unflatten(-1, (-1, self.group_size)), (self.group_size,), eps=self.eps)
        return (groups.flatten(-2) * weight).to(dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        weights = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            weights,
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def l2norm(x, dim=-1, eps=1e-6):
    return x * (x.square().sum(dim, keepdim=True) + eps).rsqrt()


def causal_conv1d(x, weight, bias=None, activation=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """The depthwise convolution of flash-linear-attention, of x [b, n, d] with weight [d, w]."""
    assert initial_state is None and not output_final_state, "segments prepend the columns before them"
    return causal_conv1d_fn(x.mT, weight, bias, cu_seqlens, activation).mT, None


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    """The depthwise convolution of causal-conv1d, of x [b, d, n] with weight [d, w]."""
    _unpacked(seq_idx)
    channels, width = weight.shape
    output = F.conv1d(F.pad(x, (width - 1, 0)), weight.unsqueeze(1), bias, groups=channels)
    return output if activation is None else F.silu(output)


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    """The gated delta rule (arXiv 2412.06464, section 3.3), for q and k [b, n, h, d], v [b, n, h, e], the logarithm g
    of the decay and the writing strength beta [b, n, h]; the state is [b, h, d, e]. Megatron's own computes in fp32.

        S_t = exp(g_t) (I − beta_t k_t k_tᵀ) S_{t−1} + beta_t k_t v_tᵀ,    o_t = S_tᵀ q_t / √d
    """
    _unpacked(cu_seqlens)
    dtype = v.dtype
    length = q.shape[1]
    if use_qk_l2norm_in_kernel:
        q = l2norm(q)
        k = l2norm(k)
    q = q * q.shape[-1] ** -0.5
    q, k, v, g, beta = (_in_chunks(x, _CHUNK) for x in (q, k, v, g, beta))
    g = g.cumsum(-1)
    k_beta = k * beta.unsqueeze(-1)
    v_beta = v * beta.unsqueeze(-1)
    # The writes of a token depend on those of earlier tokens in the chunk: a triangular system.
    system = ((k_beta @ k.mT) * _decay(g)).tril(-1)
    right = torch.cat([v_beta, k_beta * g.exp().unsqueeze(-1)], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    output, state = _recurrence(q, k, written, g, initial_state, erased)
    last_state = state if output_final_state else None
    return output[:, :length].to(dtype), last_state


def mamba_chunk_scan_combined(
    *inputs, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False, return_final_states=False
):
    """The scan of Mamba-2 (arXiv 2405.21060, section 6), for x and z [b, n, h, p], dt [b, n, h], A [h], B and C
    [b, n, g, d], D [h] or [h, p]; the state is [b, h, p, d].

        S_t = exp(dt_t A) S_{t−1} + dt_t x_t B_tᵀ,    y_t = (S_t C_t + D x_t) · silu(z_t)
    """
    x, dt, A, B, C, chunk_size = inputs
    length, heads = x.shape[1:3]
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    b, c = (_in_chunks(y.repeat_interleave(heads // y.shape[2], 2), chunk_size) for y in (B, C))
    g = _in_chunks(dt * A, chunk_size).cumsum(-1)
    written = _in_chunks(x * dt.unsqueeze(-1), chunk_size)
    output, state = _recurrence(c, b, written, g, None if initial_states is None else initial_states.mT)
    output = output[:, :length]
    if D is not None:
        output = output + x * (D if D.dim() == 2 else D.unsqueeze(-1))
    if z is not None:
        output = output * F.silu(z)
    output = output.to(x.dtype)
    return (output, state.mT) if return_final_states else output


def mamba_training(mixer, zxBCdt, packed_seq_params=None, **options):
    """`MambaMixer._ssm_training` with separate convolution and scan, as Megatron runs them for a prompt."""
    _unpacked(packed_seq_params)
    run = getattr(mixer, owner_of(scan_of_mamba())[1])
    return run(zxBCdt, conv_state=None, ssm_state=None, **options)


def _in_chunks(x, chunk):
    """[b, n, h, ...] to [b, h, chunks, chunk, ...], padded with zeros, in the type of the computation."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)
    missing = -x.shape[2] % chunk
    padding = (0, 0) * (x.dim() - 3) + (0, missing)
    return F.pad(x, padding).unflatten(2, (-1, chunk))


def _recurrence(q, k, written, g, state, erased=None):
    """The outputs [b, n, h, e] and the last state [b, h, d, e] of S_t = exp(g_t) S_{t−1} + k_t w_tᵀ, o_t = S_tᵀ q_t for
    chunks [b, h, chunks, chunk, ...], with w_t = written_t − S₀ᵀ erased_t. g is summed up within each chunk; S₀ is the
    state before it."""
    within = (q @ k.mT) * _decay(g)
    from_state = q * g.exp().unsqueeze(-1)
    to_state = k * (g[..., -1:] - g).exp().unsqueeze(-1)
    kept = g[..., -1].exp()[..., None, None]
    if state is None:
        state = q.new_zeros(*q.shape[:2], k.shape[-1], written.shape[-1])
    state = state.to(q.dtype)
    outputs = []
    for i in range(g.shape[2]):
        new = written[:, :, i] if erased is None else written[:, :, i] - erased[:, :, i] @ state
        outputs.append(from_state[:, :, i] @ state + within[:, :, i] @ new)
        state = kept[:, :, i] * state + to_state[:, :, i].mT @ new
    return torch.cat(outputs, 2).transpose(1, 2), state


def _decay(g):
    """exp(g_i − g_j) for j ≤ i, 0 elsewhere, from the sums g [..., chunk] of logarithms of decays."""
    # Above the diagonal the exponent is positive and could overflow.
    return (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()


def _unpacked(documents):
    if documents is not None:
        raise ValueError(
            "recurrent layers on a CPU take packed documents from our schedules only; add --sequence-splits or "
            "--pipeline-schedule"
        )


# By the names in megatron.core.ssm; the flags mark the packages as installed.
KERNELS = MappingProxyType(
    {
        "gated_delta_net.common.HAVE_FLA": True,
        "gated_delta_net.common.l2norm": l2norm,
        "gated_delta_net.gdn.causal_conv1d": causal_conv1d,
        "gated_delta_net.gdn.chunk_gated_delta_rule": chunk_gated_delta_rule,
        "mamba_mixer.HAVE_MAMBA_SSM": True,
        "mamba_mixer.ExtendedRMSNorm": GatedRMSNorm,
        "mamba_mixer.causal_conv1d_fn": causal_conv1d_fn,
        "mamba_mixer.mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_mixer.MambaMixer._ssm_training": mamba_training,
    }
)
