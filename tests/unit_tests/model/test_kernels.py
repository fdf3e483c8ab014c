"""Every kernel that runs on a CPU against plain softmax attention in fp64, called as segment attention calls it."""

import math

import pytest
import torch

from megatron.seq1f1b.model.kernels import AttentionRule, Saved
from megatron.seq1f1b.model.kernels.adapted import Padded
from megatron.seq1f1b.model.kernels.cpu import CpuFlash
from megatron.seq1f1b.model.kernels.unfused import Unfused
from megatron.seq1f1b.model.kv_cache import KVCache

KERNELS = {
    "flash": lambda rule: Padded(CpuFlash(rule)),
    "flash, padded to 8": lambda rule: Padded(CpuFlash(rule), 8),
    "unfused": Unfused,
    "unfused, small blocks": lambda rule: Unfused(rule, scores_at_once=1000),
}

# Sequences, query heads, KV heads, head size of queries and keys, of values.
HEADS = {
    "64": (1, 2, 2, 64, 64),
    "80": (2, 2, 2, 80, 80),
    "96": (1, 4, 2, 96, 96),
    "128": (2, 4, 1, 128, 128),
    "odd": (1, 3, 1, 23, 23),
    "latent": (2, 2, 2, 192, 128),
    "latent, one head": (2, 1, 1, 24, 16),
    "wide values": (1, 4, 2, 16, 24),
}


def cut(length: int, k: int, even: bool) -> list[tuple[int, int]]:
    """(start, end) of k segments; the uneven ones have down to one token."""
    if even:
        inner = [length * i // k for i in range(1, k)]
    else:
        inner = sorted(torch.randperm(length - 1)[: k - 1].add(1).tolist())
    return list(zip([0, *inner], [*inner, length], strict=True))


def inputs(length, heads, dtype, scale=1.0):
    batch, h, g, size, value_size = heads
    query = torch.randn(length, batch, h, size, dtype=dtype) * scale
    key = torch.randn(length, batch, g, size, dtype=dtype) * scale
    value = torch.randn(length, batch, g, value_size, dtype=dtype)
    return query, key, value, torch.randn(length, batch, h * value_size, dtype=dtype)


def dense(query, key, value, grad, mask=None):
    """Output and gradients of softmax(Q·Kᵀ/√d + causal)·mask·V by autograd in fp64."""
    query, key, value = (x.double().requires_grad_() for x in (query, key, value))
    k, v = (x.repeat_interleave(query.shape[2] // key.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, k) / math.sqrt(query.shape[3])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    output = torch.einsum("bhst,tbhd->sbhd", weights if mask is None else weights * mask, v).flatten(2)
    output.backward(grad.double())
    return [output.detach(), query.grad, key.grad, value.grad]


def by_segments(kernel_of, query, key, value, grad, bounds, accumulator=None):
    """Output and gradients through the real KVCache: forward in order, backward in reverse."""
    kernel = kernel_of(AttentionRule(1 / math.sqrt(query.shape[3])))
    cache = KVCache(len(query), key, value)
    runs = []
    for start, end in bounds:
        cache.write(start, end, key[start:end].detach(), value[start:end].detach())
        seen = cache.read(start, end)
        runs.append((*kernel.forward(query[start:end], *seen), seen))
        assert runs[-1][0].is_contiguous()
    grads = []
    for (start, end), (output, statistics, seen) in zip(reversed(bounds), reversed(runs), strict=True):
        part = kernel.backward(grad[start:end], Saved(query[start:end], *seen, output, statistics))
        *own, _ = cache.exchange_gradients(start, end, part)
        if accumulator is not None and start:
            cache.gradients._sums = [x.to(accumulator) for x in cache.gradients._sums]
        grads.append((part.query, *own))
    return [torch.cat([output for output, *_ in runs]), *(torch.cat(x[::-1]) for x in zip(*grads, strict=True))]


def worst_error(results, expected):
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("k, even", [(1, True), (2, False), (3, True), (8, False), (32, True), (32, False)])
def test_segments_equal_dense_attention(kernel, heads, k, even):
    torch.manual_seed(k)
    tensors = inputs(70, heads, torch.float64)
    results = by_segments(kernel, *tensors, cut(70, k, even))
    assert worst_error(results, dense(*tensors)) <= 1e-13


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
def test_other_types(kernel, dtype, tolerance):
    torch.manual_seed(0)
    tensors = inputs(70, HEADS["96"], dtype)
    results = by_segments(kernel, *tensors, cut(70, 4, False))
    assert all(x.dtype == dtype for x in results)
    assert worst_error(results, dense(*tensors)) <= tolerance


def rms_errors(k, accumulator=None):
    """Of dQ, dK and dV of bf16 inputs, relative to their rms, against fp64."""
    torch.manual_seed(0)
    tensors = inputs(512, (1, 4, 2, 64, 64), torch.bfloat16)
    # The unfused kernel computes in fp32, and rounds its results of every segment to bf16, as kernels on GPUs do.
    # PyTorch's CPU kernel would hide what is tested here: it adds up in bf16 itself.
    results = by_segments(Unfused, *tensors, cut(512, k, True), accumulator=accumulator)
    return [
        ((result - expected).square().mean() / expected.square().mean()).sqrt().item()
        for result, expected in zip(results[1:], dense(*tensors)[1:], strict=True)
    ]


def test_errors_in_bf16_do_not_grow_with_the_number_of_segments():
    whole, cut_up, in_bf16 = rms_errors(1), rms_errors(32), rms_errors(32, torch.bfloat16)
    assert all(many <= 1.5 * one for many, one in zip(cut_up, whole, strict=True))
    # Without the accumulators in fp32 the gradients of keys and values would miss that.
    assert all(many > 1.5 * one for many, one in zip(in_bf16[1:], whole[1:], strict=True))
