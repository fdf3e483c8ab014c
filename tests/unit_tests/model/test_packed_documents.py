"""Attention within documents, cut into segments, against attention with an explicit mask."""

from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model.attention import SegmentAttention
from megatron.seq1f1b.model.packed_documents import Piece, pieces
from megatron.seq1f1b.model.segment import Segment, SegmentContext

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


def attention():
    """A layer for heads of 8."""
    return SegmentAttention(
        SimpleNamespace(kv_channels=8, softmax_scale=None, attention_dropout=0.0, sequence_parallel=False)
    )


def masked_attention(query, key, value, documents):
    """softmax(Q·Kᵀ/√d + mask)·V with explicit scores; [s, b, h, d] to [s, b, h·d]."""
    length, batch, heads, size = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / size**0.5
    number = torch.zeros(batch, length, dtype=torch.long)
    for sequence, starts in enumerate(documents):
        number[sequence, list(starts)] = 1
    number = number.cumsum(1)
    seen = (number[:, :, None] == number[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).reshape(length, batch, heads * size)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("documents", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("k", CUTS)
def test_attention_and_gradients_stay_within_documents(k, documents, dtype, tolerance):
    torch.manual_seed(k)
    query, grad = (torch.randn(LENGTH, 2, 4, 8, dtype=dtype) for _ in range(2))
    key, value = (torch.randn(LENGTH, 2, 2, 8, dtype=dtype) for _ in range(2))
    grad = grad.flatten(2)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    expected = masked_attention(*exact, documents)
    expected.backward(grad.double())

    layer = attention()
    layer.context = context = SegmentContext()
    bounds = [0, *CUTS[k], LENGTH]
    units = []
    for i in range(k):
        segment = Segment(0, i, bounds[i], bounds[i + 1], LENGTH, documents)
        inputs = [x[segment.start : segment.end].detach().requires_grad_() for x in (query, key, value)]
        with context.running(segment, keeps_for_backward=True):
            units.append((segment, inputs, layer(*inputs)))
    for segment, _, output in reversed(units):
        with context.running(segment, keeps_for_backward=True):
            output.backward(grad[segment.start : segment.end])
    context.assert_empty()

    results = [torch.cat([output for *_, output in units])]
    results += [torch.cat([inputs[i].grad for _, inputs, _ in units]) for i in range(3)]
    for result, reference in zip(results, [expected, *(x.grad for x in exact)], strict=True):
        assert result.dtype == dtype
        assert (result - reference).abs().max() <= tolerance * reference.abs().max()


def test_a_flattened_batch_is_an_error():
    query = torch.randn(8, 1, 2, 8)
    layer = attention()
    layer.context = context = SegmentContext()
    running = context.running(Segment(0, 0, 0, 8, 8, ((0,), (0, 3))), keeps_for_backward=True)
    with running, pytest.raises(AssertionError, match="1 sequences for a micro-batch of 2.*--micro-batch-size 1"):
        layer(query, query, query)
