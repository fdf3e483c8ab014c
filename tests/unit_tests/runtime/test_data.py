"""One segment of a batch at a time."""

import torch

from megatron.seq1f1b.model import Segment
from megatron.seq1f1b.runtime.data import SegmentIterator


def batch(number):
    return {
        "tokens": torch.arange(2 * 8).view(2, 8) + 100 * number,
        "attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool).tril(),
        "name": f"batch {number}",
        "per sequence": torch.tensor([1, 2]),
    }


def segment(microbatch, index):
    return Segment(microbatch, index, *[(0, 5), (5, 8)][index], 8)


def test_segments_of_a_batch_make_up_the_batch():
    batches = SegmentIterator(iter([batch(0)]))
    parts = [next(batches.at(segment(0, index))) for index in range(2)]
    assert torch.equal(torch.cat([part["tokens"] for part in parts], dim=1), batch(0)["tokens"])
    assert all(part["tokens"].is_contiguous() for part in parts)
    assert parts[1]["attention_mask"].shape == (2, 1, 3, 3)
    assert parts[0]["name"] == "batch 0" and torch.equal(parts[1]["per sequence"], torch.tensor([1, 2]))


def test_batches_are_read_once_and_in_order_whatever_is_asked_first():
    reads = []

    def reading():
        for number in range(3):
            reads.append(number)
            yield batch(number)

    batches = SegmentIterator(reading())
    order = [(1, 0), (0, 0), (1, 1), (0, 1), (2, 0), (2, 1)]
    for microbatch, index in order:
        part = next(batches.at(segment(microbatch, index)))
        assert part["name"] == f"batch {microbatch}"
    assert reads == [0, 1, 2]
    assert not batches._kept


def test_a_whole_sequence_is_handed_through_untouched():
    original = batch(0)
    batches = SegmentIterator(iter([original]))
    assert next(batches.at(Segment(0, 0, 0, 8, 8))) is original
