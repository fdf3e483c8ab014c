"""Every kernel that runs on a CPU against plain softmax attention in fp64, by segments."""

import pytest
import torch

from megatron.seq1f1b.model import kv_cache
from megatron.seq1f1b.model.kernels.adapted import Padded
from megatron.seq1f1b.model.kernels.flash import CpuFlash
from megatron.seq1f1b.model.kernels.unfused import Unfused
from support.segments import HEADS, attention, expected, inputs, run, segments_of, worst_error

KERNELS = {
    "flash": lambda rule: Padded(CpuFlash(rule)),
    "flash, padded to 8": lambda rule: Padded(CpuFlash(rule), 8),
    "unfused": Unfused,
    "unfused, small blocks": lambda rule: Unfused(rule, scores_at_once=1000),
}


def cut(length, k, even):
    """The bounds of k segments; the uneven ones have down to one token."""
    if even:
        inner = [length * i // k for i in range(1, k)]
    else:
        inner = sorted(torch.randperm(length - 1)[: k - 1].add(1).tolist())
    return [0, *inner, length]


def by_segments(kernel, tensors, bounds):
    return run(attention(tensors[0].shape[3], kernel), tensors[:3], tensors[3], segments_of(bounds))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("k, even", [(1, True), (2, False), (3, True), (8, False), (32, True), (32, False)])
def test_segments_equal_dense_attention(kernel, heads, k, even):
    torch.manual_seed(k)
    tensors = inputs(70, heads)
    results = by_segments(kernel, tensors, cut(70, k, even))
    assert worst_error(results, expected(*tensors)) <= 1e-13


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
def test_other_types(kernel, dtype, tolerance):
    torch.manual_seed(0)
    tensors = inputs(70, HEADS["96"], dtype)
    results = by_segments(kernel, tensors, cut(70, 4, False))
    assert all(x.dtype == dtype for x in results)
    assert worst_error(results, expected(*tensors)) <= tolerance


def rms_errors(k):
    """Errors of dQ, dK and dV for bf16 inputs against fp64, relative to their rms."""
    torch.manual_seed(0)
    tensors = inputs(512, (1, 4, 2, 64, 64), torch.bfloat16)
    # The unfused kernel computes in fp32, and rounds its results of every segment to bf16, as kernels on GPUs do.
    # PyTorch's CPU kernel would hide what is tested here: it adds up in bf16 itself.
    results = by_segments(Unfused, tensors, cut(512, k, True))
    return [
        ((result - exact).square().mean() / exact.square().mean()).sqrt().item()
        for result, exact in zip(results[1:], expected(*tensors)[1:], strict=True)
    ]


def test_errors_in_bf16_do_not_grow_with_the_number_of_segments(monkeypatch):
    whole, cut_up = rms_errors(1), rms_errors(32)
    assert all(many <= 1.5 * one for many, one in zip(cut_up, whole, strict=True))
    # Without the accumulators in fp32 the gradients of keys and values would miss that.
    added = kv_cache._added
    monkeypatch.setattr(kv_cache, "_added", lambda *grads: added(*grads).to(torch.bfloat16))
    assert all(many > 1.5 * one for many, one in zip(rms_errors(32)[1:], whole[1:], strict=True))
