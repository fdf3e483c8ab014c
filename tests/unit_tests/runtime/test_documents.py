"""Where documents start, by the arguments of a call of the model, and for units by the entries of a batch."""

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.seq1f1b.runtime.segments.segmentation import documents_of
from megatron.seq1f1b.runtime.segments.sequence_source import document_starts

END = 9
SHAPE = (2, 12)
BEFORE = torch.ones(12, 12, dtype=torch.bool).triu(1)  # of a causal mask


@pytest.fixture
def tokens():
    tokens = torch.arange(24).view(SHAPE) % 8
    tokens[0, [2, 3, 11]] = END
    tokens[1, 0] = END
    return tokens


def positions(starts):
    return [torch.nonzero(row).flatten().tolist() for row in starts]


def test_a_token_that_ends_a_document(tokens):
    """It belongs to the document that it ends; after the last token nothing starts. Without it tokens do not tell."""
    assert positions(document_starts({"tokens": tokens}, SHAPE, END)) == [[0, 3, 4], [0, 1]]
    with pytest.raises(ValueError, match="no dict with cu_seqlens, attention_mask or tokens that end them; drop"):
        document_starts({"tokens": tokens}, SHAPE, None)


def test_megatrons_mask_says_the_same(tokens):
    masks = [_get_ltor_masks_and_position_ids(row, END, False, True, False, True)[0] for row in tokens]
    batch = {"tokens": torch.zeros_like(tokens), "attention_mask": torch.stack(masks)}
    assert positions(document_starts(batch, SHAPE, END)) == [[0, 3, 4], [0, 1]]


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_padded"])
def test_cumulative_lengths(tokens, name):
    """Filled up to one length, as data sets do to stack them; they come before anything else."""
    lengths = torch.tensor([[0, 5, 6, 12, 12], [0, 12, 12, 12, 12]], dtype=torch.int32)
    batch = {"tokens": tokens, "attention_mask": None, "cu_seqlens": None, name: lengths}
    assert positions(document_starts(batch, SHAPE, END)) == [[0, 5, 6], [0]]
    assert positions(document_starts({"cu_seqlens": lengths[0]}, (1, 12), END)) == [[0, 5, 6]]


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"cu_seqlens": torch.tensor([[0, 12, 24]])}, "reaches to token 24, but must have a row that ends at 12 for"),
        ({"cu_seqlens": torch.tensor([[0, 12]])}, r"cu_seqlens \[1, 2\] .* each of the 2 sequences"),
        ({"tokens": torch.zeros(1, 24)}, r"tokens \[1, 24\] in a batch does not fit"),
        ({"attention_mask": torch.zeros(1, 1, 12, 12)}, r"attention_mask \[1, 12, 12\] in a batch does not fit"),
        ({"attention_mask": torch.zeros(2, 1, 12, 12, dtype=torch.bool)}, "hides more or less than other documents"),
        ({"attention_mask": (BEFORE | BEFORE.mT.tril(-4)).expand(2, 1, 12, 12)}, "hides more or less"),
        ({"text": torch.zeros(2, 13)}, "no dict with cu_seqlens, attention_mask or tokens that"),
        (torch.zeros(2, 13), "no dict with"),
    ],
)
def test_a_batch_that_does_not_tell_is_an_error(batch, message):
    with pytest.raises(ValueError, match=message):
        document_starts(batch, SHAPE, END)


def pack(bounds, padded=None):
    return PackedSeqParams("thd", torch.tensor(bounds), None, padded and torch.tensor(padded))


@pytest.mark.parametrize(
    "packed, documents",
    [
        (pack([0, 5, 9]), ((0, 5),)),
        (pack([0, 5, 9], [0, 6, 12]), ((0, 6),)),
        (pack([0, 5, 9, 12, 12, 12]), ((0, 5, 9),)),
        (pack([0, 5, 9, -1, -1]), ((0, 5, 9),)),  # padding behind the last document
        (pack([0, 5, 5, 12]), ((0, 5),)),
    ],
    ids=["lengths", "padded", "repeated", "filled up", "an empty document"],
)
def test_the_packed_format_of_a_call(packed, documents):
    """Padding between documents and at the end belongs to the one before it, or is one of its own."""
    end = 12 if documents[0][-1] == 9 or packed.cu_seqlens_q[-1] == 12 or packed.cu_seqlens_q_padded is not None else 9
    assert documents_of({"packed_seq_params": packed}, 1, end, "the mask") == documents


def test_a_pack_is_one_row():
    with pytest.raises(ValueError, match="one row of tokens, but the call of the model has 2 rows; flatten"):
        documents_of({"packed_seq_params": pack([0, 5, 12])}, 2, 12, "the mask")


def test_the_mask_of_a_call(tokens):
    masks = [_get_ltor_masks_and_position_ids(row, END, False, True, False, True)[0] for row in tokens]
    assert documents_of({"attention_mask": torch.stack(masks)}, *SHAPE, "the mask") == ((0, 3, 4), (0, 1))
    assert documents_of({"attention_mask": BEFORE.expand(1, 1, 12, 12)}, *SHAPE, "the mask") is None
    assert documents_of({}, *SHAPE, "the mask") is None
    with pytest.raises(ValueError, match="the mask hides more or less than other documents"):
        documents_of({"attention_mask": (BEFORE | BEFORE.mT.tril(-4))[None, None]}, *SHAPE, "the mask")
