"""What Seq1F1B saves: the bytes that a step holds at its peak, on each rank, are those that the formula gives.

All that PyTorch allocates in a step counts, whoever holds it: activations, keys and values, messages, workspace.
"""

import weakref
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

from megatron.seq1f1b.model import Segment, SegmentContext, attach
from megatron.seq1f1b.rehearsal.ledger import Ledger
from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation
from megatron.seq1f1b.runtime.step import cut
from megatron.seq1f1b.schedule import Kind, Placement, ScheduleChoice, Shape, build
from support.on_ranks import on_ranks
from tools.benchmarking.model import Batch, build_model, counted_beside, use_ranks

RANKS, SEQUENCE, HIDDEN, LAYERS, VOCABULARY, MICROBATCHES = 4, 1024, 32, 4, 64, 5
KEYS_AND_VALUES = LAYERS * 2 * SEQUENCE * HIDDEN * 4  # bytes of a micro-batch on one rank


class Stage:
    """The model of this rank, and one micro-batch."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        sizes = {"num_layers": LAYERS * RANKS, "hidden_size": HIDDEN, "num_attention_heads": 2, "seq_length": SEQUENCE}
        args = Namespace(**sizes, vocab_size=vocabulary, hybrid_layer_pattern=None)
        self.model, self.batch = build_model(args, 1), Batch(args).as_dict()
        self._outputs: list[weakref.ref] = []

    def counting(self) -> AbstractContextManager[Ledger]:
        weights, buffers = self.model[0].parameters(), self.model[0].module.buffers()
        return counted_beside([*(x for p in weights for x in (p, p.main_grad)), *buffers, *self.batch.values()])

    def forward_step(self, data_iterator, model):
        """Asserts that outputs which were sent to the next stage are empty by then."""
        if not parallel_state.is_pipeline_last_stage():
            sizes = [output.numel() for output in (ref() for ref in self._outputs) if output is not None]
            assert sizes == [1] * len(sizes), f"outputs of {sizes} elements stay after they were sent"
        output, loss = Batch.forward_step(data_iterator, model)
        self._outputs.append(weakref.ref(output))
        return output, loss

    def peak_of(self, schedule: Callable, microbatches: int = MICROBATCHES) -> int:
        """Bytes at the peak of one training step."""
        self.model[0].zero_grad_buffer()
        with self.counting() as counter:
            schedule(
                forward_step_func=self.forward_step,
                data_iterator=iter([self.batch] * microbatches),
                model=self.model,
                num_microbatches=microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=1,
                forward_only=False,
            )
        return counter.moments()[0].peak_bytes

    def kept(self, lengths: Sequence[int]) -> int:
        """What the forwards of one micro-batch leave on this rank for their backwards, the input included."""
        context, outputs, end = SegmentContext(), [], 0
        attach(self.model, context)
        with self.counting() as counter:
            for index, length in enumerate(lengths):
                start, end = end, end + length
                segment = Segment(0, index, start, end, SEQUENCE)
                if not parallel_state.is_pipeline_first_stage():
                    self.model[0].module.set_input_tensor(torch.randn(length, 1, HIDDEN).requires_grad_())
                part = {name: cut(x, segment) for name, x in self.batch.items()}
                with context.running(segment, keeps_for_backward=True):
                    outputs.append(Batch.forward_step(iter([part]), self.model[0])[0])
            self.model[0].module.set_input_tensor(None)
        sent = 0 if parallel_state.is_pipeline_last_stage() else sum(x.untyped_storage().nbytes() for x in outputs)
        return counter.moments()[0].end - sent


def executor(lengths: Sequence[int], **options) -> PipelineExecutor:
    return PipelineExecutor(ScheduleChoice("1f1b"), Segmentation(len(lengths), lambda _: lengths), **options)


def peak_promised(rank: int, lengths: Sequence[int], kept: int) -> float:
    """Bytes at the peak of Seq1F1B if a micro-batch leaves `kept` bytes.

    Units in flight count by their tokens. The keys and values of a micro-batch stay as long as any segment of it is in
    flight, and while it goes backward there are gradients of those before its last segment.
    """
    shape = Shape(Placement(RANKS), MICROBATCHES, len(lengths))
    per_token = (kept - KEYS_AND_VALUES) / SEQUENCE
    gradients = KEYS_AND_VALUES * (SEQUENCE - lengths[-1]) / SEQUENCE
    now = peak = units = most_units = 0
    for kind, _, _, segment in build("1f1b", shape).ranks[rank]:
        is_first, is_last = segment == 0, segment == len(lengths) - 1
        if kind is Kind.F:
            now += per_token * lengths[segment] + KEYS_AND_VALUES * is_first
            units += 1
        else:
            now += gradients * is_last
        peak, most_units = max(peak, now), max(most_units, units)
        if kind is not Kind.F:
            now -= per_token * lengths[segment] + (KEYS_AND_VALUES + gradients) * is_first
            units -= 1
    assert most_units == min(RANKS - rank - 1 + len(lengths), shape.num_units)
    return peak


@on_ranks(RANKS)
def test_the_peak_is_units_in_flight_and_keys_and_values():
    use_ranks(num_chunks=1)
    rank, stage = dist.get_rank(), Stage()
    uncut = stage.kept((SEQUENCE,))
    whole = min(RANKS - rank, MICROBATCHES) * uncut
    own = stage.peak_of(forward_backward_pipelining_without_interleaving)
    assert own == pytest.approx(whole, rel=0.05)
    for lengths in ((256,) * 4, (448, 256, 192, 128)):
        kept = stage.kept(lengths)
        assert kept <= uncut
        promised, found = peak_promised(rank, lengths, kept), stage.peak_of(executor(lengths))
        assert found == pytest.approx(promised, rel=0.05)
        assert found / own == pytest.approx(promised / whole, rel=0.05)


@on_ranks(RANKS)
def test_the_loss_in_pieces_keeps_no_logits():
    """All segments go forward before the first goes backward, so their logits, or none, are there at once."""
    use_ranks(num_chunks=1)
    more = 4096 - VOCABULARY  # words
    logits, weights = 4 * SEQUENCE * more, 4 * HIDDEN * more

    def growth(piece: int | None) -> int:
        few, many = (Stage(words).peak_of(executor((256,) * 4, piece=piece), 1) for words in (VOCABULARY, 4096))
        return many - few

    kept, in_pieces = growth(piece=None), growth(piece=2**14)
    if parallel_state.is_pipeline_last_stage():  # gradients of the words' weights: those of a piece, and their sum
        assert in_pieces < 2 * weights + 0.01 * logits < logits < kept
