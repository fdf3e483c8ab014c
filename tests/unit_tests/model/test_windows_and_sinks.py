"""Sliding windows and softmax sinks cut into segments against one softmax over the whole sequence."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.seq1f1b.model.attention import SegmentAttention
from megatron.seq1f1b.model.kernels import KernelChoice
from megatron.seq1f1b.model.segment import Segment, SegmentContext

LENGTH, BATCH, HEADS, GROUPS, SIZE = 150, 2, 4, 2, 8
CUTS = [(150,), (100, 30, 20), (60, 3, 2, 5, 80)]
DOCUMENTS = ((0, 20, 97), (0, 64))


def attention(window, sink, backend):
    config = SimpleNamespace(kv_channels=SIZE, softmax_scale=None, attention_dropout=0.0, sequence_parallel=False)
    return SegmentAttention(config, kernels=KernelChoice(backend), window=window, sink=sink)


def plain_attention(query, key, value, window, sink, documents):
    """softmax over the keys that are seen and, where there is one, a sink that has no value."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / SIZE**0.5
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(-window)
    seen = seen.expand(BATCH, 1, -1, -1)
    if documents is not None:
        numbers = torch.stack([(torch.arange(LENGTH)[:, None] >= torch.tensor(row)).sum(1) for row in documents])
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, HEADS, 1, 1).expand(BATCH, -1, LENGTH, 1)], -1)
    weights = scores.softmax(-1)[..., :LENGTH]
    return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def run_segments(layer, tensors, grad, lengths, documents):
    """Output and the gradients of query, key and value; those of a sink go to its `grad`."""
    layer.context = context = SegmentContext()
    ends = torch.tensor(lengths).cumsum(0).tolist()
    segments = [
        Segment(0, i, end - length, end, LENGTH, documents)
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    inputs, outputs = [], []
    for segment in segments:
        part = [x[segment.start : segment.end].detach().requires_grad_() for x in tensors]
        with context.running(segment, keeps_for_backward=True):
            outputs.append(layer(*part))
        inputs.append(part)
    for segment, output in zip(reversed(segments), reversed(outputs), strict=True):
        with context.running(segment, keeps_for_backward=True):
            output.backward(grad[segment.start : segment.end])
    context.assert_empty()
    return [torch.cat(outputs).detach(), *(torch.cat([part[i].grad for part in inputs]) for i in range(3))]


@pytest.mark.parametrize("backend", ["flash", "unfused"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("window", [None, 0, 7, 50])
@pytest.mark.parametrize("lengths", CUTS, ids=str)
def test_segments_equal_one_softmax(lengths, window, sink, documents, backend):
    torch.manual_seed(len(lengths))
    query = torch.randn(LENGTH, BATCH, HEADS, SIZE, dtype=torch.float64)
    key, value = (torch.randn(LENGTH, BATCH, GROUPS, SIZE, dtype=torch.float64) for _ in range(2))
    grad = torch.randn(LENGTH, BATCH, HEADS * SIZE, dtype=torch.float64)
    sinks = torch.nn.Parameter(torch.linspace(-1, 2, HEADS, dtype=torch.float64)) if sink else None

    exact = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = plain_attention(*exact, window, sinks, documents)
    expected.backward(grad)
    references = [expected.detach(), *(x.grad for x in exact)]
    if sink:
        references.append(sinks.grad.clone())
        sinks.grad = None
    layer = attention(window, sinks, backend)
    results = run_segments(layer, (query, key, value), grad, lengths, documents)
    if sink:
        results.append(sinks.grad)

    for result, reference in zip(results, references, strict=True):
        # Where a query sees one key its own gradient is zero, so errors are relative to the inputs, which are about 1.
        assert (result - reference).abs().max() <= 1e-13 * reference.abs().max().clamp(min=1)


def test_off_by_one_adds_one_to_the_denominator():
    score = torch.randn(1, 1, 1, SIZE, dtype=torch.float64)
    layer = attention(None, torch.zeros(1), "flash")
    value = torch.ones(1, 1, 1, SIZE, dtype=torch.float64)
    weight = torch.sigmoid((score * score).sum() / SIZE**0.5)
    assert torch.allclose(layer(score, score, value), weight.expand(1, 1, SIZE), rtol=1e-12)


WINDOW, OF_TOKEN = 16, 2 * 2 * SIZE * 4  # bytes of keys and values in fp32


def kept_tokens(context):
    """Tokens whose keys and values layers keep, by the bytes of their storages."""
    tensors = [x for cache in context.kept() for rows in cache._rows.values() for x in rows]
    return sum({x.data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()) / OF_TOKEN


def windowed(ends, documents=None):
    """A layer with a window, and the segments and inputs that it runs on."""
    layer = attention(WINDOW, None, "flash")
    layer.context = SegmentContext()
    query, key, value = (torch.randn(LENGTH, 1, 2, SIZE, requires_grad=True) for _ in range(3))
    segments = [Segment(0, i, start, end, LENGTH, documents) for i, (start, end) in enumerate(pairwise([0, *ends]))]
    return layer, [(segment, [x[segment.start : segment.end] for x in (query, key, value)]) for segment in segments]


@pytest.mark.parametrize("documents", [None, ((0, 20, 97),)], ids=["whole", "documents"])
def test_segments_in_flight_are_kept_and_gradients_of_a_window(documents):
    layer, parts = windowed([50, 60, 80, LENGTH], documents)
    outputs = []
    for segment, inputs in parts:
        with layer.context.running(segment, keeps_for_backward=True):
            outputs.append(layer(*inputs))
        assert kept_tokens(layer.context) == segment.end
    for segment, _ in reversed(parts):
        outputs.pop().sum().backward()
        assert kept_tokens(layer.context) == segment.start
        for cache in layer.context.kept():
            assert [x.untyped_storage().nbytes() for x in cache.gradients._sums] == [WINDOW * OF_TOKEN / 2] * 2
    layer.context.assert_empty()


def test_segments_that_are_computed_again_keep_a_window_each():
    layer, parts = windowed([50, 60, 80, LENGTH])
    outputs = []

    def run(segment, *inputs):
        with layer.context.running(segment, keeps_for_backward=True):
            return layer(*inputs)

    for segment, inputs in parts:
        outputs.append(checkpoint(partial(run, segment), *inputs, use_reentrant=True))
    assert kept_tokens(layer.context) == 16 + 10 + 16 + 16
    for output in reversed(outputs):
        output.sum().backward()
    layer.context.assert_empty()


def test_evaluation_keeps_one_window():
    layer, parts = windowed([10, 50, 60, 80, LENGTH])
    kept = []
    for segment, inputs in parts:
        with layer.context.running(segment, keeps_for_backward=False), torch.no_grad():
            layer(*inputs)
        kept.append(kept_tokens(layer.context))
    assert kept == [10, WINDOW, WINDOW, WINDOW, 0]
