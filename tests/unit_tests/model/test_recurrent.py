"""The rules of recurrent layers in chunks, from a state, against one token after the other."""

import pytest
import torch
import torch.nn.functional as F

from megatron.seq1f1b.platform import cpu

cpu.activate()

from megatron.seq1f1b.platform.recurrent import chunk_gated_delta_rule, mamba_chunk_scan_combined  # noqa: E402

BATCH = 2


def delta_inputs(rows, scalars):
    heads, key, value = 3, 8, 6
    q, k = (F.normalize(rows(heads, key), dim=-1) for _ in range(2))
    return q, k, rows(heads, value), -scalars(heads), scalars(heads)


def delta_rule_by_token(q, k, v, g, beta, state):
    """The recurrence as its equation has it, one token after the other."""
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], state))
        state = state + torch.einsum("bhd,bhe->bhde", k[:, t], new)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t], state) / q.shape[3] ** 0.5)
    return torch.stack(outputs, 1), state


def scan_inputs(rows, scalars):
    heads, head, groups, size = 4, 5, 2, 3
    x, z, dt = rows(heads, head), rows(heads, head), scalars(heads)
    a, d = -torch.rand(heads, dtype=x.dtype), torch.randn(heads, dtype=x.dtype)
    return x, dt, a, rows(groups, size), rows(groups, size), d, z


def scan_by_token(x, dt, a, b, c, d, z, state):
    b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (b, c))
    outputs = []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * a).exp()[..., None, None]
        state = state + torch.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], b[:, t])
        outputs.append((torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + d[:, None] * x[:, t]) * F.silu(z[:, t]))
    return torch.stack(outputs, 1), state


def chunked_rule(*inputs):
    return chunk_gated_delta_rule(*inputs[:-1], initial_state=inputs[-1], output_final_state=True)


def chunked_scan(x, dt, a, b, c, d, z, state):
    return mamba_chunk_scan_combined(x, dt, a, b, c, 16, D=d, z=z, initial_states=state, return_final_states=True)


RULES = {
    "delta": (delta_inputs, chunked_rule, delta_rule_by_token, (BATCH, 3, 8, 6)),
    "scan": (scan_inputs, chunked_scan, scan_by_token, (BATCH, 4, 5, 3)),
}


@pytest.mark.parametrize("length", [1, 5, 64, 100, 150])
@pytest.mark.parametrize("kind", RULES)
def test_chunks_equal_one_token_after_the_other(kind, length):
    """Output, final state and the gradients of all inputs and of the state before."""
    make, *rules, shape = RULES[kind]
    torch.manual_seed(length)
    of = {"dtype": torch.float64}
    inputs = make(lambda *sizes: torch.randn(BATCH, length, *sizes, **of), lambda n: torch.rand(BATCH, length, n, **of))
    inputs = [x.requires_grad_() for x in (*inputs, torch.randn(shape, **of))]
    found = []
    for rule in rules:
        results = rule(*inputs)
        loss = sum((x * torch.linspace(-1, 1, x.numel(), **of).view_as(x)).sum() for x in results)
        found.append([*results, *torch.autograd.grad(loss, inputs)])
    for mine, exact in zip(*found, strict=True):
        assert (mine - exact).abs().max() <= 1e-12 * exact.abs().max()
