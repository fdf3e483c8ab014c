"""Attention cut into segments against plain softmax attention of the whole sequence."""

from types import SimpleNamespace

import pytest
import torch

from benchmark_host import moved_by_attention
from megatron.seq1f1b.model.attention import SegmentAttention
from megatron.seq1f1b.model.segment import Segment, SegmentContext

# Tokens, sequences, query heads, KV heads, head size of queries and keys, of values.
SHAPES = [(96, 1, 4, 4, 16, 16), (75, 2, 8, 2, 8, 8), (64, 1, 4, 1, 40, 40), (50, 2, 4, 4, 24, 16)]
CUTS = {1: None, 2: (0.6,), 3: (0.5, 0.8), 4: (0.25, 0.5, 0.75), 7: (0.1, 0.2, 0.3, 0.31, 0.5, 0.97)}


def attention(size, dropout=0.0):
    """A layer for heads of `size`."""
    config = SimpleNamespace(kv_channels=size, softmax_scale=None, attention_dropout=dropout, sequence_parallel=False)
    return SegmentAttention(config)


def plain_attention(query, key, value):
    """softmax(Q·Kᵀ/√d + causal)·V with explicit scores; [s, b, h, d] to [s, b, h·e]."""
    length, _, heads, size = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / size**0.5
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def bounds_of(length, k):
    inner = [] if k == 1 else [round(share * length) for share in CUTS[k]]
    return list(zip([0, *inner], [*inner, length], strict=True))


def run_segments(query, key, value, grad, bounds):
    """Forward of all segments in order, backward in reverse; output and input gradients of the whole."""
    layer = attention(query.shape[3])
    layer.context = context = SegmentContext()
    segments = [Segment(0, i, start, end, len(query)) for i, (start, end) in enumerate(bounds)]
    inputs, outputs = [], []
    for segment in segments:
        part = [x[segment.start : segment.end].detach().requires_grad_() for x in (query, key, value)]
        with context.running(segment, keeps_for_backward=True):
            outputs.append(layer(*part))
        inputs.append(part)
    for segment, output in zip(reversed(segments), reversed(outputs), strict=True):
        with context.running(segment, keeps_for_backward=True):
            output.backward(grad[segment.start : segment.end])
    context.assert_empty()
    grads = [torch.cat([part[i].grad for part in inputs]) for i in range(3)]
    return [torch.cat(outputs).detach(), *grads]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", CUTS)
def test_segments_equal_plain_attention(dtype, tolerance, shape, k):
    length, batch, heads, groups, size, value_size = shape
    torch.manual_seed(k)
    query = torch.randn(length, batch, heads, size, dtype=dtype)
    key = torch.randn(length, batch, groups, size, dtype=dtype)
    value = torch.randn(length, batch, groups, value_size, dtype=dtype)
    grad = torch.randn(length, batch, heads * value_size, dtype=dtype)

    exact = [x.double().requires_grad_() for x in (query, key, value)]
    expected = plain_attention(*exact)
    expected.backward(grad.double())
    results = run_segments(query, key, value, grad, bounds_of(length, k))

    for result, reference in zip(results, [expected.detach(), *(x.grad for x in exact)], strict=True):
        assert result.dtype == dtype
        assert (result - reference).abs().max() <= tolerance * reference.abs().max()


def test_gradients_accumulate_in_fp32_for_16_bit_models():
    query, key, value = (torch.randn(64, 1, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    layer = attention(8)
    layer.context = context = SegmentContext()
    outputs = []
    for i, (start, end) in enumerate([(0, 32), (32, 64)]):
        with context.running(Segment(0, i, start, end, 64), keeps_for_backward=True):
            part = [x[start:end].detach().requires_grad_() for x in (query, key, value)]
            outputs.append(layer(*part))
    outputs[1].backward(torch.ones_like(outputs[1]))
    (cache,) = context._caches.values()
    assert [x.dtype for x in cache.gradients._sums] == [torch.float32] * 2


def test_evaluation_frees_the_cache_after_the_last_segment():
    query, key, value = (torch.randn(32, 1, 2, 8) for _ in range(3))
    layer = attention(8)
    layer.context = context = SegmentContext()
    with torch.no_grad():
        for i, (start, end) in enumerate([(0, 16), (16, 32)]):
            with context.running(Segment(0, i, start, end, 32), keeps_for_backward=False):
                layer(*(x[start:end] for x in (query, key, value)))
    context.assert_empty()


def test_saved_bytes_are_those_of_the_unsegmented_sequence():
    """Query, output and log-sum-exp per segment, keys and values once: nothing grows with the number of segments."""
    query, key, value = (torch.randn(256, 1, 4, 16) for _ in range(3))

    def saved_bytes(k):
        storages = {}

        def note(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        layer = attention(16)
        layer.context = context = SegmentContext()
        keep = []
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            for i, (start, end) in enumerate(bounds_of(256, k)):
                part = [x[start:end].clone().requires_grad_() for x in (query, key, value)]
                with context.running(Segment(0, i, start, end, 256), keeps_for_backward=True):
                    keep.append((part, layer(*part)))
        for cache in context._caches.values():
            note(cache._keys), note(cache._values)
        return sum(storages.values())

    assert saved_bytes(1) == saved_bytes(2) == saved_bytes(4) == saved_bytes(7) == 256 * (4 * 4 * 16 + 4) * 4


def test_a_batch_that_was_not_cut_is_an_error():
    query = torch.randn(64, 1, 2, 8)
    layer = attention(8)
    layer.context = context = SegmentContext()
    running = context.running(Segment(0, 0, 0, 32, 64), keeps_for_backward=True)
    with running, pytest.raises(AssertionError, match="64 tokens for a segment of 32"):
        layer(query, query, query)


def test_attention_runs_few_kernels_beside_its_own():
    """Two copies forward in every unit; backward two sums over the prefix and two over the segment's own rows, and no
    sum where there is nothing to add to."""
    assert moved_by_attention([64]).kernels == 0
    assert moved_by_attention([16] * 4).kernels == 4 * 2 + (2 + 2 * 2) + 3 * 2
    # Documents that end with their segment leave no gradients for earlier ones, others only in what they have of them.
    assert moved_by_attention([16] * 4, ((0, 16, 32, 48),)).kernels == 4 * 2
    within_two, whole = (moved_by_attention([16] * 4, (starts,)).bytes for starts in ((0, 40), (0,)))
    assert within_two < whole
