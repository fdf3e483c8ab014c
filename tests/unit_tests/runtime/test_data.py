"""One segment of a batch at a time."""

import pytest
import torch

from megatron.seq1f1b.model import Segment
from megatron.seq1f1b.runtime.data import SegmentIterator, cut


def batch(number):
    return {
        "tokens": torch.arange(2 * 8).view(2, 8) + 100 * number,
        "attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool).tril(),
        "name": f"batch {number}",
        "per sequence": torch.tensor([1, 2]),
    }


def segment(microbatch, index):
    return Segment(microbatch, index, *[(0, 5), (5, 8)][index], 8)


def test_segments_make_up_batches_that_are_read_once_in_order():
    batches = SegmentIterator(map(batch, range(3)))
    order = [(1, 0), (0, 0), (1, 1), (0, 1), (2, 0), (2, 1)]
    parts = {unit: next(batches.at(segment(*unit))) for unit in order}
    for number in range(3):
        tokens = [parts[number, index]["tokens"] for index in range(2)]
        assert torch.equal(torch.cat(tokens, dim=1), batch(number)["tokens"])
        assert all(part.is_contiguous() for part in tokens)
    assert parts[2, 1]["attention_mask"].shape == (2, 1, 3, 3) and parts[2, 1]["name"] == "batch 2"
    assert torch.equal(parts[2, 1]["per sequence"], torch.tensor([1, 2])) and not batches._kept


@pytest.mark.parametrize("shape", [(2, 9), (8, 2)], ids=["tokens and labels in one", "sequences in columns"])
def test_a_batch_that_cannot_be_cut_names_its_tensors(shape):
    text = torch.zeros(shape, dtype=torch.long)
    batches = SegmentIterator(iter([{"text": text, "noise": torch.zeros(8, 2), "per sequence": torch.tensor([1, 2])}]))
    with pytest.raises(ValueError, match=r"sequences of 8 tokens to cut: \['text'\] \[\d, \d\]; yield") as refusal:
        next(batches.at(segment(0, 0)))
    assert "per sequence" not in str(refusal.value) and "noise" not in str(refusal.value)
    activations = torch.zeros(8, 2, 4)  # may be laid out otherwise
    assert next(SegmentIterator(iter([activations])).at(segment(0, 0))).shape == (8, 2, 4)


def test_a_segment_of_a_packed_batch_is_a_packed_batch():
    """Documents that lie outside of the segment have no tokens in it; the entry stays as long as it was."""
    lengths = torch.tensor([[0, 3, 6, 7, 8, 8, 8, 8]], dtype=torch.int32)
    batches = SegmentIterator(iter([{"tokens": torch.zeros(1, 8), "cu_seqlens": lengths, "max_seqlen": 3}]))
    first, second = (next(batches.at(segment(0, index))) for index in range(2))
    assert first["cu_seqlens"].tolist() == [[0, 3, 5, 5, 5, 5, 5, 5]]
    assert second["cu_seqlens"].tolist() == [[0, 0, 1, 2, 3, 3, 3, 3]]
    assert first["cu_seqlens"].dtype == torch.int32 and second["max_seqlen"] == 3


def test_a_whole_sequence_is_handed_through_and_stays_whole():
    """Megatron cuts it in place for context-parallel ranks."""
    original = batch(0)
    batches = SegmentIterator(iter([original]))
    handed_out = next(batches.at(Segment(0, 0, 0, 8, 8)))
    assert handed_out is original
    handed_out["tokens"] = handed_out["tokens"][:, :4]
    assert torch.equal(batches.latest["tokens"], batch(0)["tokens"])


def test_a_part_of_a_pinned_batch_is_pinned(monkeypatch):
    """The copy to a GPU would hold up the host otherwise. Nothing can be pinned here, so the request counts."""
    empty, asked = torch.empty, []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **kwargs: asked.append(pin_memory) or empty(*args))
    tokens, segment = torch.arange(16.0).view(2, 8), Segment(0, 1, 4, 8, 8)
    part = cut(tokens, segment)
    assert asked == [True] and part.is_contiguous() and torch.equal(part, tokens[:, 4:])
    # A part of one sequence is contiguous, and already in pinned memory.
    part = cut(tokens[:1], segment)
    assert asked == [True] and part.data_ptr() == tokens[0, 4:].data_ptr()
