"""What programs may pass to the heads of multi-token prediction on a segment."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron.seq1f1b.model import LookAhead, PredictionHeads, Segment, SegmentContext
from megatron.seq1f1b.process.patches import patched

LAYER = SimpleNamespace(
    layer_number=1, cp_group=None, config=SimpleNamespace(mtp_detach_heads=False, sequence_parallel=False)
)


def embedded(**options):
    """Tokens, positions, padding mask and embeddings of a segment of three tokens, which 9 follows."""
    ahead = LookAhead({name: torch.full((1, 1, 1), 9.0) for name in ("input_ids", "position_ids")}, torch.ones(2))
    context = SegmentContext()
    running = context.running(Segment(0, 0, 0, 3, 6), keeps_for_backward=True)
    with running, patched(PredictionHeads(context, lambda segment: ahead).patches()):
        hidden = torch.ones(3, 1, 2, requires_grad=True)
        return MultiTokenPredictionLayer._get_embeddings(
            LAYER, torch.tensor([[1, 2, 3]]), None, lambda input_ids, position_ids: input_ids, hidden, **options
        )


def test_positions_may_be_missing():
    tokens, positions, *_ = embedded()
    assert tokens.tolist() == [[2, 3, 9]] and positions is None


def test_a_padding_mask_is_refused():
    with pytest.raises(ValueError, match="multi-token prediction got a padding_mask, .*; drop --sequence-splits"):
        embedded(padding_mask=torch.zeros(1, 3, dtype=torch.bool))
