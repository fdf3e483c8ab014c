"""The rules of recurrent layers in chunks, from a state, against one token after the other."""

import pytest
import torch
import torch.nn.functional as F

from megatron.seq1f1b import cpu

cpu.activate()

from megatron.seq1f1b.cpu.recurrent import chunk_gated_delta_rule, mamba_chunk_scan_combined  # noqa: E402


def delta_inputs(length, dtype):
    torch.manual_seed(length)
    batch, heads, key, value = 2, 3, 8, 6
    q, k = (F.normalize(torch.randn(batch, length, heads, key, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(batch, length, heads, value, dtype=dtype)
    g = -torch.rand(batch, length, heads, dtype=dtype)
    beta = torch.rand(batch, length, heads, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def delta_rule_by_token(q, k, v, g, beta, state=None):
    """The recurrence as its equation has it, one token after the other."""
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], state))
        state = state + torch.einsum("bhd,bhe->bhde", k[:, t], new)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t], state) / q.shape[3] ** 0.5)
    return torch.stack(outputs, 1), state


def scan_inputs(length, dtype):
    torch.manual_seed(length)
    batch, heads, head, groups, size = 2, 4, 5, 2, 3
    x, z = (torch.randn(batch, length, heads, head, dtype=dtype) for _ in range(2))
    dt = torch.rand(batch, length, heads, dtype=dtype)
    a = -torch.rand(heads, dtype=dtype)
    b, c = (torch.randn(batch, length, groups, size, dtype=dtype) for _ in range(2))
    d = torch.randn(heads, dtype=dtype)
    return [y.requires_grad_() for y in (x, dt, a, b, c, d, z)]


def scan_by_token(x, dt, a, b, c, d, z, state=None):
    b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (b, c))
    state = torch.zeros(*x[:, 0].shape, b.shape[3], dtype=x.dtype) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * a).exp()[..., None, None]
        state = state + torch.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], b[:, t])
        outputs.append((torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + d[:, None] * x[:, t]) * F.silu(z[:, t]))
    return torch.stack(outputs, 1), state


def chunked_rule(q, k, v, g, beta, state=None):
    return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)


def chunked_scan(x, dt, a, b, c, d, z, state=None):
    return mamba_chunk_scan_combined(x, dt, a, b, c, 16, D=d, z=z, initial_states=state, return_final_states=True)


RULES = {
    "delta": (delta_inputs, chunked_rule, delta_rule_by_token, (2, 3, 8, 6)),
    "scan": (scan_inputs, chunked_scan, scan_by_token, (2, 4, 5, 3)),
}


def results(rule, inputs, state):
    """Output, final state and the gradients of all inputs and of the state before."""
    state = state.detach().requires_grad_()
    output, after = rule(*inputs, state)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in (output, after)]
    grads = torch.autograd.grad((output * weights[0]).sum() + (after * weights[1]).sum(), [*inputs, state])
    return [output, after, *grads]


@pytest.mark.parametrize("length", [1, 5, 64, 100, 150])
@pytest.mark.parametrize("kind", RULES)
def test_chunks_equal_one_token_after_the_other(kind, length):
    make, chunked, by_token, shape = RULES[kind]
    inputs, state = make(length, torch.float64), torch.randn(shape, dtype=torch.float64)
    for mine, exact in zip(results(chunked, inputs, state), results(by_token, inputs, state), strict=True):
        assert (mine - exact).abs().max() <= 1e-12 * exact.abs().max()
