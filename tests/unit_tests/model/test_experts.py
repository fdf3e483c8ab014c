"""The balance loss of experts by segments against the product of both sums over the whole sequence."""

from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model import Segment, SegmentContext
from megatron.seq1f1b.model.layers import experts
from megatron.seq1f1b.model.layers.experts import (
    _BALANCES,
    _OVER_STEP,
    _apply_balance,
    _count_segment,
    _Product,
    _Tally,
)

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


def test_an_average_over_a_step_has_whole_micro_batches(monkeypatch):
    """Two of them, with the same tokens, whose segments go forward in turn, as a schedule file may have it: the average
    of each over those that went forward before it is its own counts."""
    # Sums over ranks, of which there are none here.
    monkeypatch.setattr(experts, "get_tokens_per_expert_and_token_count", lambda chosen, group: (chosen.sum(0), None))
    router = torch.nn.Module()
    router.num_experts = EXPERTS
    router.segment_context = SegmentContext()
    router.tp_dp_cp_group = None
    router.ga_steps = torch.tensor(0.0)
    router.global_tokens_per_expert = torch.zeros(EXPERTS)
    chosen = torch.rand(LENGTH, EXPERTS, generator=torch.Generator().manual_seed(0)) < 0.3
    tallies = {}
    for index, (start, end) in enumerate(BOUNDS):
        for microbatch in range(2):
            router.segment_context.segment = Segment(microbatch, index, start, end, LENGTH)
            tallies[microbatch] = _count_segment(router, _OVER_STEP, chosen[start:end], sequences=1)
    for tally in tallies.values():
        torch.testing.assert_close(tally.chosen(), chosen.sum(0).float())
    assert router.ga_steps == 2
    torch.testing.assert_close(router.global_tokens_per_expert, 2 * chosen.sum(0).float())
