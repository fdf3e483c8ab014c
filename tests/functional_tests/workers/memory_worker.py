"""Counts the bytes that a training step holds on each rank, with Seq1F1B and with Megatron's own 1F1B.

Started on four ranks; compares them with what the schedules promise. Everything that PyTorch allocates in the step
counts, whoever holds it: activations, keys and values, messages, workspace.
"""

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron.seq1f1b import cpu

cpu.activate()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel.schedules import (  # noqa: E402
    forward_backward_pipelining_without_interleaving,
)

from megatron.seq1f1b.model import Segment, SegmentContext, attach  # noqa: E402
from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation  # noqa: E402
from megatron.seq1f1b.runtime.data import cut  # noqa: E402
from megatron.seq1f1b.schedule import Kind, Placement, ScheduleChoice, Shape, build  # noqa: E402
from tools.benchmarking.allocated import Allocated  # noqa: E402
from tools.benchmarking.model import build_model, use_ranks  # noqa: E402

SEQUENCE, HIDDEN, HEADS, LAYERS, VOCABULARY, MICROBATCHES = 1024, 32, 2, 4, 64, 5
KEYS_AND_VALUES = LAYERS * 2 * SEQUENCE * HIDDEN * 4  # bytes of a micro-batch on one rank
SPLITS = {"even": (256,) * 4, "uneven": (448, 256, 192, 128)}
MANY = 4096  # words
TOLERANCE = 0.05


def model_of(vocabulary: int = VOCABULARY) -> list[torch.nn.Module]:
    sizes = {"num_layers": LAYERS * dist.get_world_size(), "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    sizes |= {"vocab_size": vocabulary, "seq_length": SEQUENCE, "hybrid_layer_pattern": None}
    return build_model(SimpleNamespace(**sizes), 1)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": torch.arange(SEQUENCE)[None]}


def forward(model: torch.nn.Module, part: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(part["tokens"], part["positions"], None, labels=part["labels"])


class ForwardStep:
    """Megatron's `forward_step_func`; asserts that outputs which were sent to the next stage are empty by then."""

    def __init__(self) -> None:
        self._outputs: list[weakref.ref] = []

    def __call__(self, data_iterator, model):
        if not parallel_state.is_pipeline_last_stage():
            sizes = [output.numel() for output in (ref() for ref in self._outputs) if output is not None]
            assert sizes == [1] * len(sizes), f"outputs of {sizes} elements stay after they were sent"
        output = forward(model, next(data_iterator))
        self._outputs.append(weakref.ref(output))
        return output, lambda losses: (losses.sum(), torch.tensor(losses.numel()), {"loss": losses.detach().sum()})


def counting(model: list[torch.nn.Module], data: dict[str, torch.Tensor]) -> Allocated:
    parameters = list(model[0].parameters())
    return Allocated([*parameters, *(p.main_grad for p in parameters), *model[0].module.buffers(), *data.values()])


def peak_of(
    schedule: Callable, model: list[torch.nn.Module], data: dict[str, torch.Tensor], microbatches: int = MICROBATCHES
) -> int:
    """Bytes at the peak of one training step."""
    model[0].zero_grad_buffer()
    with counting(model, data) as counter:
        schedule(
            forward_step_func=ForwardStep(),
            data_iterator=iter([data] * microbatches),
            model=model,
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
    return counter.peak


def bytes_kept(model: list[torch.nn.Module], data: dict[str, torch.Tensor], lengths: Sequence[int]) -> int:
    """What the forwards of one micro-batch leave on this rank for their backwards, the input included."""
    context, outputs, end = SegmentContext(), [], 0
    attach(model, context)
    with counting(model, data) as counter:
        for index, length in enumerate(lengths):
            start, end = end, end + length
            segment = Segment(0, index, start, end, SEQUENCE)
            if not parallel_state.is_pipeline_first_stage():
                model[0].module.set_input_tensor(torch.randn(length, 1, HIDDEN).requires_grad_())
            with context.running(segment, keeps_for_backward=True):
                outputs.append(forward(model[0], {name: cut(x, segment) for name, x in data.items()}))
        model[0].module.set_input_tensor(None)
    if parallel_state.is_pipeline_last_stage():
        return counter.now
    return counter.now - sum(output.untyped_storage().nbytes() for output in outputs)


def peak_promised(rank: int, lengths: Sequence[int], kept: int) -> float:
    """Bytes at the peak of Seq1F1B if a micro-batch leaves `kept` bytes.

    Units in flight count by their tokens. The keys and values of a micro-batch stay as long as any segment of it is in
    flight, and while it goes backward there are gradients of those before its last segment.
    """
    shape = Shape(Placement(dist.get_world_size()), MICROBATCHES, len(lengths))
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
    assert most_units == min(shape.num_ranks - rank - 1 + len(lengths), shape.num_units)
    return peak


def growth_with_vocabulary(piece: int | None) -> int:
    """By how many bytes the peak of a step in segments grows where the vocabulary is `MANY` words instead of few."""
    peaks = []
    for vocabulary in (VOCABULARY, MANY):
        executor = PipelineExecutor(ScheduleChoice("1f1b"), Segmentation(4, lambda _: SPLITS["even"]), piece=piece)
        peaks.append(peak_of(executor, model_of(vocabulary), batch(), microbatches=1))
    return peaks[1] - peaks[0]


def check(name: str, measured: float, promised: float) -> None:
    print(f"rank {dist.get_rank()}, {name}: {measured:.4g}, promised {promised:.4g}", flush=True)
    assert abs(measured / promised - 1) < TOLERANCE, f"{name}: {measured:.4g} instead of {promised:.4g}"


def main() -> None:
    dist.init_process_group("gloo")
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    use_ranks(num_chunks=1)
    model, data = model_of(), batch()

    uncut = bytes_kept(model, data, (SEQUENCE,))
    whole = min(num_ranks - rank, MICROBATCHES) * uncut
    megatrons = peak_of(forward_backward_pipelining_without_interleaving, model, data)
    check("bytes of Megatron's own 1F1B", megatrons, whole)
    for name, lengths in SPLITS.items():
        kept = bytes_kept(model, data, lengths)
        assert kept <= uncut, f"a micro-batch in {name} segments keeps {kept} bytes, uncut {uncut}"
        promised = peak_promised(rank, lengths, kept)
        executor = PipelineExecutor(
            ScheduleChoice("1f1b"), Segmentation(len(lengths), lambda _, lengths=lengths: lengths)
        )
        ours = peak_of(executor, model, data)
        check(f"bytes of Seq1F1B, {name} segments", ours, promised)
        check(f"their share of Megatron's, {name} segments", ours / megatrons, promised / whole)

    # All segments go forward before the first goes backward, so their logits, or none, are there at once.
    kept, in_pieces = growth_with_vocabulary(piece=None), growth_with_vocabulary(piece=2**14)
    logits = 4 * SEQUENCE * (MANY - VOCABULARY)
    gradients = 2 * 4 * HIDDEN * (MANY - VOCABULARY)  # of the words' weights: those of a piece, and their sum
    if parallel_state.is_pipeline_last_stage():
        assert in_pieces < gradients + 0.01 * logits < logits < kept, (
            f"{kept} bytes of kept logits, {in_pieces} in pieces"
        )
    print(f"rank {rank}: {kept / logits:.3f} of the logits are kept, {in_pieces / logits:.3f} in pieces", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
