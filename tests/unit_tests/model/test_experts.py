"""The balance loss of experts by segments against the product of both sums over the whole sequence."""

from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model import Segment, SegmentContext
from megatron.seq1f1b.model.layers.experts import _BALANCES, _apply_balance, _Product, _Tally

LENGTH, EXPERTS, FACTOR = 30, 7, 1 / 3
BOUNDS = [(0, 11), (11, 19), (19, 30)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_a_balance_loss_are_rounded_once(dtype):
    torch.manual_seed(0)
    probabilities = torch.rand(LENGTH, EXPERTS).to(dtype)
    chosen = torch.rand(LENGTH, EXPERTS) < 0.3
    grad = torch.tensor(0.1, dtype=dtype)

    # In at least fp32, for probabilities of any type.
    computed_in = torch.promote_types(dtype, torch.float32)
    exact = (grad.to(computed_in) * FACTOR * chosen.sum(0).to(computed_in)).to(dtype)

    tally, released, parts = _Tally(), [], []
    for index, (start, end) in enumerate(BOUNDS):
        sums = probabilities[start:end].sum(0).requires_grad_()
        tally.counts[index] = chosen[start:end].sum(0)
        release = (lambda: None) if index else (lambda: released.append(True))
        parts.append((sums, _Product.apply(sums, tally, FACTOR, release)))
    total = sum(loss.double() for _, loss in parts)
    torch.testing.assert_close(
        total, FACTOR * (probabilities.double().sum(0) * chosen.sum(0)).sum(), rtol=10 * torch.finfo(dtype).eps, atol=0
    )
    for sums, loss in reversed(parts):
        loss.backward(grad.to(loss.dtype))
        assert sums.grad.dtype == dtype
        torch.testing.assert_close(sums.grad, exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert released == [True]


def test_a_padding_mask_is_refused():
    router = SimpleNamespace(segment_context=SegmentContext(), get_aux_loss_coeff=lambda kind: 0.1)
    router.segment_context.segment = Segment(0, 0, 0, 4, 8)
    with pytest.raises(ValueError, match="a balance loss of experts got a padding_mask, .*; drop --sequence-splits"):
        _apply_balance(_BALANCES[0], router, *[None] * 4, with_padding_mask=True)
