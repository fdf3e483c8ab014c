"""What flash attention kernels for GPUs compute, on the CPU and with their demands on the arguments.

Takes the place of the real kernels, to test that the code around them passes the right tensors in the right layout and
reads the results correctly. Whether the real kernels compute the same is tested on a GPU, by scripts/gpu_test.sh.
"""

import torch
from torch import Tensor


def random_state(dropout: float) -> Tensor:
    """Two numbers, from PyTorch's generator where there is something to drop."""
    return torch.randint(2**31, (2,)).to(torch.uint64) if dropout else torch.zeros(2, dtype=torch.uint64)


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, state: Tensor, packing=(), one_size=True
) -> tuple[Tensor, Tensor]:
    """Output [b, n, h, d] and log-sum-exp [b, h, n] in fp32; the causal mask is aligned bottom-right.

    With a `packing` (cumulative lengths of queries and keys, the largest of each), of the documents of one sequence:
    output [n, h, d] and log-sum-exp [h, n]. With `one_size`, all heads are of one.
    """
    _check(query, key, value, one_size=one_size)
    output, logsumexp = _attend(*(x.double() for x in (query, key, value)), scale, dropout, state, packing)
    return output.to(query.dtype).contiguous(), logsumexp.float()


def backward(
    grad, query, key, value, output, logsumexp, scale, dropout, state, packing=(), one_size=True
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, from what the forward saved."""
    _check(query, key, value, output, grad, one_size=one_size)
    assert grad.shape == output.shape == (*query.shape[:-1], value.shape[-1])
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        expected, statistics = _attend(*exact, scale, dropout, state, packing)
    # A backward reads the output only beside its gradient: where heads are padded, the rest is never used.
    used = grad.flatten(0, -2).any(dim=0)
    torch.testing.assert_close(output[..., used], expected[..., used].to(output.dtype))
    torch.testing.assert_close(logsumexp, statistics.float())
    grads = torch.autograd.grad(expected, exact, grad.double())
    return tuple(x.to(query.dtype).contiguous() for x in grads)


def _check(query: Tensor, *rest: Tensor, one_size: bool) -> None:
    assert query.dtype in (torch.bfloat16, torch.float16)
    for x in (query, *rest):
        assert x.dtype == query.dtype and x.dim() == query.dim() and x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256
        assert x.shape[-1] == query.shape[-1] or not one_size
    assert all(query.shape[-2] % x.shape[-2] == 0 for x in rest)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, state: Tensor, packing):
    key, value = (x.repeat_interleave(query.shape[-2] // x.shape[-2], dim=-2) for x in (key, value))
    scores = torch.einsum("...shd,...thd->...hst", query, key) * scale
    scores = scores.masked_fill(_hidden(*scores.shape[-2:], packing), float("-inf"))
    assert state.dtype == torch.uint64 and state.shape == (2,)
    generator = torch.Generator().manual_seed(int(state[0]) * 2**31 + int(state[1]))
    mask = torch.empty(scores.shape, dtype=torch.float64).bernoulli_(1 - dropout, generator=generator) / (1 - dropout)
    return torch.einsum("...hst,...thd->...shd", scores.softmax(-1) * mask, value), scores.logsumexp(-1)


def _hidden(queries: int, keys: int, packing) -> Tensor:
    """[queries, keys]: those of other documents, and those after the query, counted from the end of its document."""
    one_document = (torch.tensor([0, count], dtype=torch.int32) for count in (queries, keys))
    *ends, most_queries, most_keys = packing or (*one_document, queries, keys)
    assert all(x.dtype == torch.int32 and x.is_contiguous() and x[0] == 0 for x in ends)
    assert [int(x[-1]) for x in ends] == [queries, keys]
    assert [int(x.diff().max()) for x in ends] == [most_queries, most_keys]
    places = [torch.arange(count) for count in (queries, keys)]
    documents = [torch.bucketize(place, x[1:], right=True) for place, x in zip(places, ends, strict=True)]
    left = [x[1:][document] - place for x, document, place in zip(ends, documents, places, strict=True)]
    return (documents[0][:, None] != documents[1]) | (left[0][:, None] > left[1])
