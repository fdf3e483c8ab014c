"""Attention within documents, cut into segments, against attention with an explicit mask."""

import pytest
import torch

from megatron.seq1f1b.model.packed_documents import Piece, pieces
from support.segments import attention, expected, inputs, run, segments_of, worst_error

LENGTH = 48
PACKED = {
    "one": ((0,), (0,)),
    "two": ((0, 20), (0, 31)),
    "of one token": ((0, 1, 2, 23, 24, 25, 47), (0, 46, 47)),
    "at a segment start": ((0, 12, 24, 36), (0, 24)),
    "every token": (tuple(range(LENGTH)), (0,)),
}
CUTS = {1: (), 2: (24,), 3: (12, 36), 4: (12, 24, 36), 7: (3, 11, 12, 25, 40, 47)}


@pytest.mark.parametrize(
    "start, end, expected",
    [
        (0, 4, [Piece(0, 0, 4)]),
        (4, 8, [Piece(0, 4, 5), Piece(5, 5, 8)]),
        (5, 6, [Piece(5, 5, 6)]),
        (6, 12, [Piece(5, 6, 9), Piece(9, 9, 10), Piece(10, 10, 12)]),
        (11, 12, [Piece(10, 11, 12)]),
    ],
)
def test_pieces_of_a_segment(start, end, expected):
    assert pieces((0, 5, 9, 10), start, end) == expected


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("documents", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("k", CUTS)
def test_attention_and_gradients_stay_within_documents(k, documents, dtype, tolerance):
    torch.manual_seed(k)
    *tensors, grad = inputs(LENGTH, (2, 4, 2, 8, 8), dtype)
    results = run(attention(8), tensors, grad, segments_of([0, *CUTS[k], LENGTH], documents))
    assert all(result.dtype == dtype for result in results)
    assert worst_error(results, expected(*tensors, grad, documents=documents)) <= tolerance


def test_a_flattened_batch_is_an_error():
    query = torch.randn(8, 1, 2, 8)
    layer = attention(8)
    running = layer.context.running(*segments_of([0, 8], ((0,), (0, 3))), keeps_for_backward=True)
    with running, pytest.raises(AssertionError, match="1 sequences for a micro-batch of 2.*--micro-batch-size 1"):
        layer(query, query, query)
