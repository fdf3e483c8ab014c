"""Batches of sequences become micro-batches in units: joined, trimmed, with positions of their own."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.seq1f1b.partition import packs_of_step
from megatron.seq1f1b.runtime import Repacking, Segmentation
from megatron.seq1f1b.runtime.model_calls.call_arguments import Arguments
from megatron.seq1f1b.runtime.segments.sequence_source import BOUNDS
from megatron.seq1f1b.schedule import Placement


def pack(lengths, replicas, equal_counts):
    return packs_of_step(lengths, 4, 2, replicas, equal_counts=equal_counts)


def step_of(*batches, size=1, length=12, forward_only=False):
    alone = dist.group.WORLD
    return SimpleNamespace(
        config=SimpleNamespace(),
        chunks=[SimpleNamespace()],
        iterators=[iter(batches)],
        num_microbatches=len(batches),
        micro_batch_size=size,
        batch_size=size,
        seq_length=length,
        forward_only=forward_only,
        groups=SimpleNamespace(tp=alone, dp=alone, dp_cp=alone),
        pipeline=alone,
        placement=Placement(1),
        rank=0,
    )


def in_units():
    return Repacking(pack, 9)


def cut(*batches, **sizes):
    step = step_of(*batches, **sizes)
    in_units().cut_step(step, None)
    return step


def read(found):
    """The batches of a model, unit by unit."""
    [batches] = found.iterators
    return [
        [
            {name: entry[:, segment.start : segment.end] for name, entry in batch.items() if name not in BOUNDS}
            for segment in row
        ]
        for batch, row in zip(batches, found.segments, strict=True)
    ]


def sequence(*tokens, losses=None):
    return {
        "tokens": torch.tensor(tokens),
        "loss_mask": torch.ones(len(tokens)) if losses is None else torch.tensor(losses),
        "position_ids": torch.zeros(len(tokens), dtype=torch.long),
    }


def test_lists_of_sequences(alone):
    """The last unit of the long one, six tokens, has room for the shorter two; what has no loss at its end is gone."""
    found = cut([sequence(1, 2, 3, 4, 5, 6), sequence(7), sequence(8, 8, 8, losses=[0.0] * 3)], [sequence(3)])
    assert found.num_microbatches == 1 and found.num_sequences == [1]
    [[first, second]] = read(found)
    assert first["tokens"].tolist() == [[1, 2, 3, 4]] and second["tokens"].tolist() == [[5, 6, 7, 3]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 3]] and second["position_ids"].tolist() == [[4, 5, 0, 0]]
    assert found.segments[0][0].documents == ((0, 6, 7),)


def test_what_was_apart_in_the_last_step_of_a_training(alone):
    units = in_units()
    batch = [sequence(1, 2, 3, 4, 5, 6), sequence(7)]
    units.cut_step(step_of(batch), None)
    units.cut_step(step_of(batch, batch, forward_only=True), None)
    assert units.documents_of_step == (1, [6, 1])
    rows = Segmentation(2, lambda length, documents, number: (6, 6), packed=True, end_of_document=9)
    tokens = torch.tensor([[1, 2, 9, 3, 4, 5, 6, 7, 9, 0, 0, 0], [8] * 12])
    call = SimpleNamespace(arguments=Arguments((tokens,), {}, ("input_ids",)))
    rows.cut_step(step_of(batch, size=2), SimpleNamespace(start_all=lambda: None, at=lambda chunk, number: call))
    assert rows.documents_of_step == (1, [3, 6, 3, 12])


def test_documents_of_a_batch(alone):
    """Two rows with documents that 9 ends, and tokens without a loss behind the last."""
    tokens = torch.tensor([[1, 2, 9, 3, 4, 5, 6, 7, 9, 0, 0, 0], [8] * 12])
    batch = {
        "tokens": tokens,
        "loss_mask": (tokens > 0).double(),
        "cu_seqlens": torch.tensor([[0, 3, 9, 12], [0, 12, 12, 12]], dtype=torch.int32),
        "max_seqlen": torch.tensor([6, 12], dtype=torch.int32),
        "dataset_id": torch.tensor([0, 1]),  # in a blend
    }
    found = cut(batch, size=2)
    joined = [torch.cat([unit["tokens"] for unit in row], dim=1)[0].tolist() for row in read(found)]
    assert sorted(joined, key=len) == [[1, 2, 9, 0], [3, 4, 5, 6, 7, 9], [8] * 12]
    bounds = [[(segment.start, segment.end, segment.sequence_length) for segment in row] for row in found.segments]
    assert [(0, 4, 12), (4, 8, 12), (8, 12, 12)] in bounds


def test_each_model_chunk_has_batches_of_its_own(alone):
    """A script may change what it gets, as Megatron does for context parallelism."""
    step = step_of()
    step.num_microbatches, step.iterators = 1, [iter([[sequence(1, 2)]]) for _ in range(2)]
    in_units().cut_step(step, None)
    first, second = map(next, step.iterators)
    del first["tokens"]
    assert second["tokens"].tolist() == [[1, 2]]


def test_an_evaluation_counts_tokens(alone):
    """Not micro-batches, one of which may have none."""
    reports = [{"lm loss": torch.tensor(each)} for each in ([6.0, 2.0], [0.0, 0.0], [3.0, 1.0])]
    [found] = in_units().reports(reports, step_of(forward_only=True))
    assert found["lm loss"].tolist() == [9.0, 3.0]
    assert in_units().reports(reports, step_of()) is reports
    outputs = [torch.ones(1, 4)]
    assert in_units().reports(outputs, step_of(forward_only=True)) is outputs
    assert in_units().reports([], step_of(forward_only=True)) == []


def test_an_entry_that_no_sequence_has_a_part_of(alone):
    batch = {"tokens": torch.ones(1, 12), "attention_mask": torch.ones(1, 1, 12, 12, dtype=torch.bool)}
    with pytest.raises(ValueError, match="attention_mask .* by --no-create-attention-mask-in-dataloader"):
        cut(batch)
