"""What flash attention kernels for GPUs compute, on the CPU and with their demands on the arguments.

Takes the place of the real kernels, to test that the code around them passes the right tensors in the right layout and
reads the results correctly. Whether the real kernels compute the same is tested on a GPU, by scripts/gpu_test.sh.
"""

import torch
from torch import Tensor


def check_inputs(*tensors: Tensor, one_size: bool = True) -> None:
    """As the kernels do: query first, [b, s, h, d] or packed [t, h, d]; with `one_size`, heads are of one."""
    query, *rest = tensors
    assert query.dtype in (torch.bfloat16, torch.float16)
    for x in tensors:
        assert x.dtype == query.dtype and x.dim() == query.dim() and x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256
        assert x.shape[-1] == query.shape[-1] or not one_size
    assert all(query.shape[-2] % x.shape[-2] == 0 for x in rest)


def random_state(dropout: float) -> Tensor:
    """Two numbers, from PyTorch's generator where there is something to drop."""
    return torch.randint(2**31, (2,)).to(torch.uint64) if dropout else torch.zeros(2, dtype=torch.uint64)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    rng_state: Tensor,
    packing: tuple = (),
    one_size: bool = True,
) -> tuple[Tensor, Tensor]:
    """Output [b, n, h, d] and log-sum-exp [b, h, n] in fp32; the causal mask is aligned bottom-right.

    With a `packing`, of the documents of one sequence: output [n, h, d] and log-sum-exp [h, n].
    """
    check_inputs(query, key, value, one_size=one_size)
    if packing:
        parts = [
            forward(*(x[None] for x in (query[rows], key[keys], value[keys])), scale, dropout, rng_state)
            for rows, keys in _documents(packing, query, key)
        ]
        return torch.cat([output[0] for output, _ in parts]), torch.cat([logsumexp[0] for _, logsumexp in parts], -1)
    output, logsumexp = _attend(*(x.double() for x in (query, key, value)), scale, dropout, rng_state)
    return output.to(query.dtype).contiguous(), logsumexp.float()


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    dropout: float,
    rng_state: Tensor,
    packing: tuple = (),
    one_size: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from what the forward saved."""
    check_inputs(query, key, value, output, grad, one_size=one_size)
    if packing:
        parts = []
        for rows, keys in _documents(packing, query, key):
            tensors = grad[rows], query[rows], key[keys], value[keys], output[rows], logsumexp[:, rows]
            parts.append(backward(*(x[None] for x in tensors), scale, dropout, rng_state))
        return tuple(torch.cat([x[0] for x in of_one]) for of_one in zip(*parts, strict=True))
    batch, length, heads, _ = query.shape
    assert grad.shape == output.shape == (batch, length, heads, value.shape[3])
    assert logsumexp.shape == (batch, heads, length) and logsumexp.dtype == torch.float32
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        expected, statistics = _attend(*exact, scale, dropout, rng_state)
    torch.testing.assert_close(output, expected.to(output.dtype))
    torch.testing.assert_close(logsumexp, statistics.float())
    grads = torch.autograd.grad(expected, exact, grad.double())
    return tuple(x.to(query.dtype).contiguous() for x in grads)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, rng_state: Tensor
) -> tuple[Tensor, Tensor]:
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bshd,bthd->bhst", query, key) * scale
    rows, keys = scores.shape[-2:]
    assert keys >= rows
    hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    assert rng_state.dtype == torch.uint64 and rng_state.shape == (2,)
    generator = torch.Generator().manual_seed(int(rng_state[0]) * 2**31 + int(rng_state[1]))
    mask = torch.empty(scores.shape, dtype=torch.float64).bernoulli_(1 - dropout, generator=generator) / (1 - dropout)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1) * mask, value), scores.logsumexp(-1)


def _documents(packing: tuple, query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    query_ends, key_ends, most_queries, most_keys = packing
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert query_ends.is_contiguous() and key_ends.is_contiguous()
    assert query_ends[0] == key_ends[0] == 0
    assert query_ends[-1] == query.shape[0] and key_ends[-1] == key.shape[0]
    assert (most_queries, most_keys) == (int(query_ends.diff().max()), int(key_ends.diff().max()))
    rows, keys = ([slice(a, b) for a, b in zip(x[:-1], x[1:], strict=True)] for x in (query_ends, key_ends))
    return list(zip(rows, keys, strict=True))
