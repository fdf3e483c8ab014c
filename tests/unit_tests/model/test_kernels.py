"""Every kernel that runs on a CPU against plain softmax attention in fp64, by segments, with dropout."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model.attention import kv_cache
from megatron.seq1f1b.model.attention import segment_attention as attention_module
from megatron.seq1f1b.model.kernels.flash import CpuFlash
from megatron.seq1f1b.model.kernels.padded import Padded
from megatron.seq1f1b.model.kernels.unfused import Unfused
from support.segments import HEADS, attention, expected, inputs, run, segments_of, worst_error

KERNELS = {
    "flash": lambda rule: Padded(CpuFlash(rule)),
    "flash, padded to 8": lambda rule: Padded(CpuFlash(rule), 8),
    "unfused": Unfused,
    "unfused, small blocks": lambda rule: Unfused(rule, scores_at_once=600),
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


class Recorded(CpuFlash):
    """Records the keys and values of every call."""

    def forward(self, query, key, value):
        self.calls.append((key, value))
        return super().forward(query, key, value)

    def backward(self, grad_output, saved):
        self.calls.append((saved.key, saved.value))
        return super().backward(grad_output, saved)


@pytest.mark.parametrize(
    "heads, are_copied",
    [((2, 2, 2, 24, 16), False), ((2, 2, 1, 24, 16), False), ((1, 2, 2, 24, 12), True), ((1, 2, 2, 20, 8), True)],
    ids=str,
)
def test_smaller_values_of_a_prefix_are_not_copied(monkeypatch, heads, are_copied):
    """They lie beside the keys in the cache, unless kernels could not read that many numbers at once."""
    calls = []
    monkeypatch.setattr(Recorded, "calls", calls, raising=False)
    tensors = inputs(70, heads)
    results = by_segments(lambda rule: Padded(Recorded(rule), 8), tensors, [0, 20, 30, 70])
    assert worst_error(results, expected(*tensors)) <= 1e-13
    assert len(calls) == 6 and all(key.shape == value.shape for key, value in calls)
    pointers = {value.untyped_storage().data_ptr() for _, value in calls}
    is_one_storage = len(pointers) == 1 and pointers == {key.untyped_storage().data_ptr() for key, _ in calls}
    assert is_one_storage != are_copied
    assert all(not place % 8 for pair in calls for x in pair for place in (*x.stride()[:3], x.storage_offset()))


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


LENGTH, BATCH, SIZE = 24, 2, 8
BOUNDS = [0, 7, 18, 24]


def some_inputs():
    torch.manual_seed(1)
    return inputs(LENGTH, (BATCH, 4, 2, SIZE, SIZE))


def step(layer, seed, tensors=None):
    """Output and gradients of all segments, whose masks come from `seed`."""
    *tensors, grad = tensors or some_inputs()
    torch.manual_seed(seed)
    return run(layer, tensors, grad, segments_of(BOUNDS))


def masks(layer, seed):
    """[b, h, s, t]: where weights stay. Values that are unit vectors bring every dropped weight to the output."""
    query, key, *_ = some_inputs()
    units = torch.eye(LENGTH, dtype=query.dtype)[:, None, None].expand(LENGTH, BATCH, 2, LENGTH)
    grad = torch.zeros(LENGTH, BATCH, 4 * LENGTH, dtype=query.dtype)
    weights, *_ = step(layer, seed, tensors=(query, key, units, grad))
    return weights.unflatten(2, (4, LENGTH)).permute(1, 2, 0, 3) != 0


@pytest.mark.parametrize("kernel", ["unfused", "unfused, small blocks"])
def test_dropout_has_the_same_masks_forward_and_backward(kernel):
    layer = attention(SIZE, KERNELS[kernel], 0.3)
    kept = masks(layer, seed=5)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert not (kept & ~seen).any()
    assert kept[..., seen].double().mean() == pytest.approx(0.7, abs=0.05)

    references = expected(*some_inputs(), mask=kept.double() / 0.7)
    for result, reference in zip(step(layer, seed=5), references, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-13)

    heads = kept[..., 18:24, :18].flatten(0, 1)
    assert all(not torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])
    assert not torch.equal(kept[..., 7:13, :7], kept[..., 18:24, :7]), "segments have masks of their own"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_random_numbers_are_those_of_megatrons_tracker(monkeypatch, sequence_parallel):
    """With sequence parallelism the whole layer runs on the tracker's state already, and Megatron does not fork. An
    evaluation drops nothing."""
    forks = []

    @contextmanager
    def fork():
        forks.append(1)
        yield

    monkeypatch.setattr(attention_module, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=fork))
    layer = attention(SIZE, None, 0.4, sequence_parallel)
    step(layer, 7)
    assert torch.equal(step(layer.eval(), 7)[0], step(attention(SIZE), 8)[0])
    assert len(forks) == (0 if sequence_parallel else len(BOUNDS) - 1)


def test_the_host_does_not_read_a_seed_from_the_device(monkeypatch):
    """It would wait for a GPU, in every layer of every unit."""
    layer, tensors = attention(SIZE, Unfused, 0.4), some_inputs()
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: pytest.fail("read"))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("read"))
    step(layer, 1, tensors=tensors)
