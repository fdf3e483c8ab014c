"""Ranks that have some of a segment's queries each: together they compute what one with all queries does."""

import pytest
import torch

from megatron.seq1f1b.model.kernels import AttentionRule, Saved, WithSink, on_parts
from megatron.seq1f1b.model.kernels.unfused import Unfused
from megatron.seq1f1b.model.packed_documents import VisibleDocuments

LENGTH, HEADS, SIZE = 24, 2, 8
RUNS = [((0, 6), (18, 24)), ((6, 12), (12, 18))]
SINK = torch.randn(HEADS, dtype=torch.float64)
DOCUMENTS = VisibleDocuments(((0, 9, 30), (0, 4, 11)))
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
    kernel = on_parts(own, prefix, [(0, LENGTH)], documents)
    query = torch.randn(LENGTH, 2, HEADS, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, prefix + LENGTH, 2, 1, SIZE, dtype=torch.float64)
    grad = torch.randn(LENGTH, 2, HEADS, SIZE, dtype=torch.float64)
    output, statistics = kernel.forward(query, key, value)
    expected = kernel.backward(grad, Saved(query, key, value, output, statistics))

    summed = []
    for runs in RUNS:
        mine, part = tokens(runs), on_parts(own, prefix, runs, documents)
        got, statistics = part.forward(query[mine], key, value)
        torch.testing.assert_close(got, output[mine])
        grads = part.backward(grad[mine], Saved(query[mine], key, value, got, statistics))
        torch.testing.assert_close(grads.query, expected.query[mine])
        summed.append(grads[1:])
    for parts, whole in zip(zip(*summed, strict=True), expected[1:], strict=True):
        if whole is not None:
            # A part may leave out keys that its queries do not see.
            torch.testing.assert_close(sum(parts), whole)
