"""Attention on parts of a segment: ranks that have some of the queries each together compute what one with all does."""

import pytest
import torch

from megatron.seq1f1b.model.kernels import AttentionRule, Saved, WithSink, on_parts
from megatron.seq1f1b.model.kernels.unfused import Unfused
from megatron.seq1f1b.model.segment import Segment
from support.segments import attention, segments_of


def test_a_flattened_batch_is_an_error():
    query = torch.randn(8, 1, 2, 8)
    layer = attention(8)
    running = layer.segment_context.running(*segments_of([0, 8], ((0,), (0, 3))), keeps_for_backward=True)
    with running, pytest.raises(AssertionError, match="1 sequences for a micro-batch of 2.*--micro-batch-size 1"):
        layer(query, query, query)


QUERIES, HEADS, SIZE = 24, 2, 8
RUNS = [((0, 6), (18, 24)), ((6, 12), (12, 18))]
SINK = torch.randn(HEADS, dtype=torch.float64)
DOCUMENTS = ((0, 9, 30), (0, 4, 11))
KERNELS = {
    "plain": (Unfused(AttentionRule(0.3)), None),
    "window": (Unfused(AttentionRule(0.3, window=5)), None),
    "sink": (WithSink(Unfused(AttentionRule(0.3)), SINK), None),
    "documents": (Unfused(AttentionRule(0.3)), DOCUMENTS),
}


def tokens(rows):
    return torch.cat([torch.arange(start, end) for start, end in rows])


@pytest.mark.parametrize("prefix", [0, 13])
@pytest.mark.parametrize("kind", KERNELS)
def test_parts_of_queries_give_parts_of_output_and_gradients(kind, prefix):
    own, documents = KERNELS[kind]
    segment = Segment(0, 0, prefix, prefix + QUERIES, prefix + QUERIES, documents)
    query = torch.randn(QUERIES, 2, HEADS, SIZE, dtype=torch.float64)
    kernel = on_parts(own, segment, None, [(0, QUERIES)], query)
    key, value = torch.randn(2, prefix + QUERIES, 2, 1, SIZE, dtype=torch.float64)
    grad = torch.randn(QUERIES, 2, HEADS, SIZE, dtype=torch.float64)
    output, statistics = kernel.forward(query, key, value)
    whole = kernel.backward(grad, Saved(query, key, value, output, statistics))

    summed = []
    for runs in RUNS:
        mine, part = tokens(runs), on_parts(own, segment, None, runs, query)
        got, statistics = part.forward(query[mine], key, value)
        torch.testing.assert_close(got, output[mine])
        grads = part.backward(grad[mine], Saved(query[mine], key, value, got, statistics))
        torch.testing.assert_close(grads.query, whole.query[mine])
        summed.append(grads[1:])
    for parts, wanted in zip(zip(*summed, strict=True), whole[1:], strict=True):
        if wanted is not None:
            torch.testing.assert_close(sum(parts), wanted)
