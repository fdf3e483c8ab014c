"""Recurrent layers in plain PyTorch: what stands in for the kernels of flash-linear-attention, mamba-ssm and
causal-conv1d, with their names and arguments.

They compute in the type of their inputs, at least in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64


def there(found: bool) -> bool:
    """Whether a package is there, whose functions this module stands in for."""
    return True


class GatedRMSNorm(torch.nn.Module):
    """x · silu(z), normalised in groups of `group_size`, times the weight; under the name and arguments of Megatron's
    `ExtendedRMSNorm`. Computes at least in fp32."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate, "Megatron's layers gate before they normalise"
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        dtype = x.dtype
        x, weight = (y.to(torch.promote_types(dtype, torch.float32)) for y in (x, self.weight))
        if z is not None:
            x = x * F.silu(z.to(x.dtype))
        groups = x.unflatten(-1, (-1, self.group_size))
        groups = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (groups.flatten(-2) * weight).to(dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """x / √(Σ x² + eps)."""
    return x * (x.square().sum(dim, keepdim=True) + eps).rsqrt()


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """A depthwise convolution of x [b, n, d] with weight [d, w], as flash-linear-attention names it."""
    _without_state(initial_state, output_final_state)
    _unpacked(cu_seqlens)
    return causal_conv1d_fn(x.mT, weight, bias, activation=activation).mT, None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """A depthwise convolution of x [b, d, n] with weight [d, w], as causal-conv1d names it."""
    _unpacked(seq_idx)
    channels, width = weight.shape
    output = F.conv1d(F.pad(x, (width - 1, 0)), weight.unsqueeze(1), bias, groups=channels)
    return output if activation is None else F.silu(output)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (arXiv 2412.06464, section 3.3), for q and k [b, n, h, d], v [b, n, h, e], the logarithm g
    of the decay and the writing strength beta [b, n, h]; the state is [b, h, d, e].

        S_t = exp(g_t) (I − beta_t k_t k_tᵀ) S_{t−1} + beta_t k_t v_tᵀ,    o_t = S_tᵀ q_t · scale
    """
    _unpacked(cu_seqlens)
    dtype, length = v.dtype, q.shape[1]
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v, g, beta = (_in_chunks(x, _CHUNK) for x in (q, k, v, g, beta))
    g = g.cumsum(-1)
    decay = _decay(g)
    k_beta, v_beta = k * beta.unsqueeze(-1), v * beta.unsqueeze(-1)
    # What each token writes depends on what those before it in the chunk have written: a triangular system.
    system = ((k_beta @ k.mT) * decay).tril(-1)
    right = torch.cat([v_beta, k_beta * g.exp().unsqueeze(-1)], -1)
    written, read = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    within = (q @ k.mT) * decay
    from_state = q * g.exp().unsqueeze(-1)
    to_state = k * (g[..., -1:] - g).exp().unsqueeze(-1)
    kept = g[..., -1].exp()[..., None, None]
    state = _initial(initial_state, v, (k.shape[-1], v.shape[-1]))
    outputs = []
    for i in range(q.shape[2]):
        new = written[:, :, i] - read[:, :, i] @ state
        outputs.append(from_state[:, :, i] @ state + within[:, :, i] @ new)
        state = kept[:, :, i] * state + to_state[:, :, i].mT @ new
    return _in_sequence(outputs, length).to(dtype), state if output_final_state else None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of Mamba-2 (arXiv 2405.21060, section 6), for x and z [b, n, h, p], dt [b, n, h], A [h], B and C
    [b, n, g, d], D [h] or [h, p]; the state is [b, h, p, d].

        S_t = exp(dt_t A) S_{t−1} + dt_t x_t B_tᵀ,    y_t = (S_t C_t + D x_t) · silu(z_t)
    """
    _unpacked(seq_idx)
    length, heads = x.shape[1:3]
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    b, c = (_in_chunks(y.repeat_interleave(heads // y.shape[2], 2), chunk_size) for y in (B, C))
    g = _in_chunks(dt * A, chunk_size).cumsum(-1)
    written = _in_chunks(x * dt.unsqueeze(-1), chunk_size)
    within = ((c @ b.mT) * _decay(g)) @ written
    from_state = c * g.exp().unsqueeze(-1)
    to_state = written.mT @ (b * (g[..., -1:] - g).exp().unsqueeze(-1))
    kept = g[..., -1].exp()[..., None, None]
    state = _initial(initial_states, written, (x.shape[-1], B.shape[-1]))
    outputs = []
    for i in range(g.shape[2]):
        outputs.append(from_state[:, :, i] @ state.mT + within[:, :, i])
        state = kept[:, :, i] * state + to_state[:, :, i]
    output = _in_sequence(outputs, length)
    if D is not None:
        output = output + x * (D if D.dim() == 2 else D.unsqueeze(-1))
    if z is not None:
        output = output * F.silu(z)
    output = output.to(x.dtype)
    return (output, state) if return_final_states else output


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """The scan, with the convolution before it, of the joint projection [b, n, ...] of z, x, B, C and dt."""
    headdim = D.shape[1] if headdim is None else headdim
    heads = A.shape[0]
    width = heads * headdim
    groups = (zxbcdt.shape[-1] - 2 * width - heads) // 2
    z, mixed, dt = zxbcdt.split([width, width + 2 * groups, heads], -1)
    mixed = causal_conv1d_fn(mixed.mT, conv1d_weight, conv1d_bias, seq_idx, activation).mT
    x, b, c = mixed.split([width, groups, groups], -1)
    x, z = (y.unflatten(-1, (heads, headdim)) for y in (x, z))
    b, c = (y.unflatten(-1, (ngroups, -1)) for y in (b, c))
    return mamba_chunk_scan_combined(x, dt, A, b, c, chunk_size, D, z, dt_bias, dt_softplus=True).flatten(2)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[b, n, h, ...] to [b, h, chunks, chunk, ...], padded with zeros, in the type of the computation."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)
    missing = -x.shape[2] % chunk
    padding = (0, 0) * (x.dim() - 3) + (0, missing)
    return F.pad(x, padding).unflatten(2, (-1, chunk))


def _in_sequence(chunks: list[Tensor], length: int) -> Tensor:
    """Chunks [b, h, chunk, d] to [b, n, h, d]."""
    return torch.cat(chunks, 2)[:, :, :length].transpose(1, 2)


def _decay(g: Tensor) -> Tensor:
    """exp(g_i − g_j) for j ≤ i, 0 elsewhere, from the sums g [..., chunk] of logarithms of decays."""
    # Above the diagonal the exponent is positive and could overflow.
    return (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()


def _initial(state: Tensor | None, like: Tensor, size: tuple[int, int]) -> Tensor:
    return like.new_zeros(*like.shape[:2], *size) if state is None else state.to(like.dtype)


def _without_state(initial_state: Tensor | None, output_final_state: bool) -> None:
    assert initial_state is None and not output_final_state, "segments prepend the columns before them"


def _unpacked(lengths: Tensor | None) -> None:
    if lengths is not None:
        raise ValueError(
            "recurrent layers on a CPU take packed documents from our schedules only; add --sequence-splits or "
            "--pipeline-schedule"
        )
