"""Masks that segments would ignore are refused, causal ones accepted."""

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron.seq1f1b.model import Segment
from megatron.seq1f1b.model.masks import MaskCheck, differs, starts_of_documents
from support.segments import attention

LENGTH = 8
TOKENS = torch.arange(LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def within_documents(start):
    """Hides later tokens, and the first of two documents from the second."""
    return CAUSAL | ((TOKENS[:, None] < start) != (start > TOKENS))


OTHERS = {
    "documents": within_documents(3),
    "documents that end with a segment": within_documents(4),
    "prefix": CAUSAL & ((TOKENS[:, None] >= 2) | (TOKENS >= 2)),
    "window": CAUSAL | torch.ones_like(CAUSAL).tril(-3),
    "bidirectional": torch.zeros_like(CAUSAL),
}


def attend(mask=None, **given):
    """An attention layer with this mask on a segment."""
    layer, tokens = attention(8), torch.randn(LENGTH, 1, 2, 8)
    with layer.segment_context.running(Segment(0, 0, 0, LENGTH, 16), keeps_for_backward=True):
        layer(tokens, tokens, tokens, mask, **given)


def check(mask):
    MaskCheck().require_causal(mask, LENGTH, "the attention mask of micro-batch 0")


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
def test_another_mask_is_refused(mask):
    with pytest.raises(ValueError, match="micro-batch 0 is not plain causal.*--reset-attention-mask"):
        check(mask[None, None])


@pytest.mark.parametrize("mask", [CAUSAL[None, None], CAUSAL.expand(3, 1, LENGTH, LENGTH), None, "text"])
def test_causal_masks_are_accepted(mask):
    check(mask)
    attend(CAUSAL[None, None], attn_mask_type=AttnMaskType.causal)


# Which tokens a sequence has.
AT_THE_END = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8]).bool()
AT_THE_START = AT_THE_END.flip(1)
# The same as a mask that programs give.
FORMS = {
    "of tokens": lambda has: has,
    "of padding": lambda has: ~has[:, None, None],
    "of later tokens and padding": lambda has: CAUSAL | ~has[:, None, None],
    "of padding also from itself": lambda has: CAUSAL | ~has[:, None, None] | ~has[:, None, :, None],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_padding_is_accepted_at_the_end_where_no_token_sees_it(form):
    check(form(AT_THE_END))
    check(form(AT_THE_END).int())
    with pytest.raises(ValueError, match="with padding at the end"):
        check(form(AT_THE_START))


def test_documents_end_before_padding():
    hidden = within_documents(3) | (TOKENS >= 6)
    starts = starts_of_documents(hidden[None], "the mask")
    assert starts.nonzero().tolist() == [[0, 0], [0, 3]]


@pytest.mark.parametrize("mask", [~CAUSAL, torch.ones_like(CAUSAL)], ids=["of what is seen", "of all"])
def test_a_mask_that_leaves_no_token_is_no_mask_of_padding(mask):
    with pytest.raises(ValueError, match="is not plain causal"):
        check(mask[None, None])
    with pytest.raises(ValueError, match="hides more or less"):
        starts_of_documents(mask[None], "the mask")


def test_masks_longer_than_a_block_of_rows_are_compared_whole():
    length = 2500
    mask = torch.ones(1, length, length, dtype=torch.bool).triu(1)
    assert not differs(mask)
    mask[0, 2400, 3] = True
    assert differs(mask)


class LikeCuda(torch.Tensor):
    is_cuda = True


def test_masks_on_a_gpu_are_settled_later():
    """A mask that is like one on a GPU: the comparison waits for `settle`."""
    masks = MaskCheck()
    for mask in (CAUSAL, within_documents(3)):
        masks.require_causal(mask[None].as_subclass(LikeCuda), LENGTH, "the mask")
    with pytest.raises(ValueError, match="the mask is not plain causal"):
        masks.settle()
    masks.settle()


@pytest.mark.parametrize(
    "given, words",
    [
        ({"attn_mask_type": AttnMaskType.no_mask}, "no_mask.*--sequence-splits"),
        ({"attention_bias": torch.zeros(1)}, "bias"),
        ({"packed_seq_params": object()}, "packed_seq_params.*--reset-attention-mask"),
    ],
)
def test_attention_that_is_not_causal_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        attend(**given)
