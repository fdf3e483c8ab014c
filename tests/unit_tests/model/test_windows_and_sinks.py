"""Sliding windows and softmax sinks cut into segments against one softmax over the whole sequence."""

from functools import cache

import pytest
import torch

from megatron.seq1f1b.model.kernels import KernelChoice
from support.segments import Attended, attention, expected, inputs, of_lengths, run, segments_of

LENGTH, BATCH, HEADS, GROUPS, SIZE = 150, 2, 4, 2, 8
CUTS = [(150,), (100, 30, 20), (60, 3, 2, 5, 80)]
DOCUMENTS = {
    "whole": None,
    "documents": ((0, 20, 97), (0, 64)),
    "of one token": ((0, 1, 2, 99, 100, 101, 149), (0, 148, 149)),
    "one sequence": ((0, 20, 22, 62, 97),),
    "at a segment start": ((0, 60, 63, 100, 130), (0, 65)),
    "every token": (tuple(range(LENGTH)), (0,)),
}


def sinks():
    return torch.nn.Parameter(torch.linspace(-1, 2, HEADS, dtype=torch.float64))


@cache
def whole(window, has_sink, documents):
    """Query, key, value and the gradient of the output; and what one softmax makes of them, however they are cut."""
    torch.manual_seed(1)
    batch = len(documents) if documents else BATCH
    tensors, sink = inputs(LENGTH, (batch, HEADS, GROUPS, SIZE, SIZE)), sinks() if has_sink else None
    references = expected(*tensors, window=window, sink=sink, documents=documents)
    return tensors, [*references, sink.grad] if has_sink else references


@pytest.mark.parametrize("backend", ["flash", "unfused"])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("has_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("window", [None, 0, 7, 50])
@pytest.mark.parametrize("lengths", CUTS, ids=str)
def test_segments_equal_one_softmax(lengths, window, has_sink, documents, backend):
    (*tensors, grad), references = whole(window, has_sink, documents)
    sink = sinks() if has_sink else None
    layer = attention(SIZE, window=window, sink=sink, kernels=KernelChoice(backend))
    results = run(layer, tensors, grad, of_lengths(lengths, documents))
    if has_sink:
        results.append(sink.grad)

    for result, reference in zip(results, references, strict=True):
        # A query that sees one key has no gradient, so errors are relative to the inputs, which are about 1.
        assert (result - reference).abs().max() <= 1e-13 * reference.abs().max().clamp(min=1)


WINDOW, OF_TOKEN = 16, 2 * 2 * SIZE * 4  # bytes of keys and values in fp32


def kept_tokens(context):
    """Tokens whose keys and values layers keep, by the bytes of their storages."""
    tensors = [x for cache in context.kept() for rows in cache.rows for x in rows._kept.values()]
    return sum({x.data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()) / OF_TOKEN


def windowed(ends, documents=None):
    """A layer with a window, and the segments and inputs that it runs on."""
    layer = attention(SIZE, window=WINDOW)
    query, key, value = (torch.randn(LENGTH, 1, 2, SIZE, requires_grad=True) for _ in range(3))
    segments = segments_of([0, *ends], documents)
    return layer, [(segment, [x[segment.start : segment.end] for x in (query, key, value)]) for segment in segments]


@pytest.mark.parametrize("documents", [None, ((0, 20, 97),)], ids=["whole", "documents"])
def test_segments_in_flight_are_kept_and_gradients_of_a_window(documents):
    layer, parts = windowed([50, 60, 80, LENGTH], documents)
    outputs = []
    for segment, part in parts:
        with layer.segment_context.running(segment, keeps_for_backward=True):
            outputs.append(layer(*part))
        assert kept_tokens(layer.segment_context) == segment.end
    for segment, _ in reversed(parts):
        outputs.pop().sum().backward()
        assert kept_tokens(layer.segment_context) == segment.start
        for kept in layer.segment_context.kept():
            assert [x._sum.untyped_storage().nbytes() for x in kept.rows] == [WINDOW * OF_TOKEN / 2] * 2
    layer.segment_context.assert_empty()


def test_segments_that_are_computed_again_keep_a_window_each():
    *tensors, grad = inputs(LENGTH, (1, 2, 2, SIZE, SIZE), torch.float32)
    layer = attention(SIZE, window=WINDOW)
    attended = Attended(layer, tensors, grad, segments_of([0, 50, 60, 80, LENGTH]), recompute=True)
    attended.forward()
    assert kept_tokens(layer.segment_context) == 16 + 10 + 16 + 16
    attended.backward()


def test_evaluation_keeps_one_window():
    layer, parts = windowed([10, 50, 60, 80, LENGTH])
    kept = []
    for segment, part in parts:
        with layer.segment_context.running(segment, keeps_for_backward=False), torch.no_grad():
            layer(*part)
        kept.append(kept_tokens(layer.segment_context))
    assert kept == [10, WINDOW, WINDOW, WINDOW, 0]
