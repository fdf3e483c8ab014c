"""Losses of a few steps of a small GPT: on the pipeline ranks that torchrun started.

Over gloo they share one GPU; over NCCL, which refuses that, each has its own. With `--segments 0` it is Megatron's own
run on one rank, with its own attention and schedule; otherwise every one of `--variants` runs in turn. With
`--unequal 1` a step has one long and some short sequences: Megatron's own run takes each alone, ours puts them into
units.
"""

import os
import statistics
import time
import zlib
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from common import Report, parse, patience, start_megatron, synchronise
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from functional_tests.equality.cases import Layout
from functional_tests.equality.layout import named, sizes_of
from functional_tests.equality.models import HEADS, Model
from megatron.seq1f1b.partition import even, packs_of_step
from megatron.seq1f1b.runtime import PipelineExecutor, Repacking, Segmentation, communication
from megatron.seq1f1b.schedule import ScheduleChoice

LAYERS, VOCABULARY, MICROBATCHES, STEPS = 8, 256, 4, 3

# Schedule, model chunks of a rank, full recomputation, the share of activations that waits on the host.
VARIANTS = {
    "1f1b": ("1f1b", 1, False, 0.0),
    "zb-h1": ("zb-h1", 1, False, 0.0),
    "recompute": ("1f1b", 1, True, 0.0),
    "chunks": ("1f1b", 2, False, 0.0),
    "zb-h1-chunks": ("zb-h1", 2, False, 0.0),
    "offload": ("1f1b", 1, False, 1.0),
    "units": ("1f1b", 1, False, 0.0),
    "packs": ("1f1b", 1, False, 0.0),  # units as long as the longest sequence
}
# Parts of the longest sequence.
UNEQUAL = (1, 3, 5, 7, 7, 30, 50, 60)


def build(args, length: int, dtype: torch.dtype, chunks: int, recomputes: bool) -> list[GPTModel]:
    """The model chunks of this rank; a layer has the same weights on any number of ranks and chunks."""
    sizes = {"hidden_size": args.hidden, "kv_channels": args.hidden // HEADS, "bf16": dtype is torch.bfloat16}
    recompute = "full" if recomputes else None
    model = Model(dtype, LAYERS, kv_heads=2, recompute=recompute, per_token_loss=bool(args.unequal)).but(**sizes)
    config = model.transformer_config(**sizes_of(Layout(dist.get_world_size(), chunks)))
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    found = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            length,
            pre_process=is_first and chunk == 0,
            post_process=is_last and chunk == chunks - 1,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=chunk if chunks > 1 else None,
        )
        for chunk in range(chunks)
    ]
    with torch.no_grad():
        for name, parameter in named(found):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 if parameter.dim() > 1 else 1 + 0.1 * noise)
    return [model.to(args.device) for model in found]


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(losses):
        total, count = losses.float().sum(), torch.full((), losses.numel(), device=losses.device)
        return total, count, {"loss": torch.stack([total.detach(), count])}

    return output, loss


def batches(length: int, step: int, args) -> list:
    """A micro-batch for each sequence, or one with a list of all for units."""
    found = []
    lengths = [max(1, length // part) for part in UNEQUAL] if args.unequal else [length] * MICROBATCHES
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(len(lengths) * step + number)
        tokens = torch.randint(VOCABULARY, (1, length + 1), generator=generator).to(args.device)
        positions = torch.arange(length, device=args.device)[None]
        found.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions})
    if args.unequal and args.segments:
        return [[{name: rows[0] for name, rows in batch.items()} for batch in found]]
    return found


@contextmanager
def no_synchronisation(args):
    """Inside, whatever makes the host wait for a GPU raises; over gloo messages have to."""
    watches = args.device == "cuda" and not args.tiny and args.segments and args.backend == "nccl"
    if watches:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if watches:
            torch.cuda.set_sync_debug_mode("default")


def losses_of(schedule, chunks: list[GPTModel], length: int, args) -> tuple[list[float], list[float]]:
    """The mean loss of every step of gradient descent, on the last rank only, and the seconds of each step."""
    found, seconds = [], []
    for step in range(2 if args.tiny else STEPS):
        start = time.perf_counter()
        for chunk in chunks:
            chunk.zero_grad()
        micro_batches = [batches(length, step, args) for _ in chunks]
        iterators = [iter(each) for each in micro_batches]
        # The first step makes communicators and kernels.
        with no_synchronisation(args) if step else nullcontext():
            reports = schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=len(micro_batches[0]),
                seq_length=length,
                micro_batch_size=1,
                forward_only=False,
            )
        with torch.no_grad():
            for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
                parameter.sub_(parameter.grad, alpha=0.05 / (length if args.unequal else 1))
        if reports:
            total, count = torch.stack([report["loss"].double() for report in reports]).sum(0).tolist()
            found.append(total / count)
        synchronise(args.device)
        seconds.append(time.perf_counter() - start)
    return found, seconds


def main() -> None:
    args = parse(segments=0, unequal=0, variants="1f1b", backend="gloo", hidden=128, ctas=communication.MAX_CTAS)
    communication.MAX_CTAS = args.ctas
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) if args.backend == "nccl" else 0)
    report = Report(args.output)
    for variant in args.variants.split(","):
        start_megatron(args.device, args.backend, VARIANTS[variant][1])
        losses = losses_of_all_dtypes(args, variant)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            report.figure(variant=variant, ctas=args.ctas, **losses)
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


def segmentation_of(args, unit: int) -> Segmentation:
    cut = partial(even, num_segments=args.segments)
    if not args.unequal:
        return Segmentation(args.segments, cut)
    return Repacking(cut, lambda lengths, replicas, alike: packs_of_step(lengths, unit, replicas=replicas, alike=alike))


def losses_of_all_dtypes(args, variant: str) -> dict[str, list[float] | float]:
    schedule, chunks, recomputes, share = VARIANTS[variant]
    length = 64 if args.tiny else 4096
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build(args, length, dtype, chunks, recomputes)
        run = forward_backward_no_pipelining
        if args.segments:
            segmentation = segmentation_of(args, length if variant == "packs" else length // args.segments)
            run = PipelineExecutor(ScheduleChoice(schedule), segmentation, timeout=patience(args.device))
            run.programs.offloaded = share
        name = str(dtype).removeprefix("torch.")
        losses[name], seconds = losses_of(run, model, length, args)
        losses[f"{name}_seconds"] = statistics.median(seconds[1:])  # the first makes communicators and kernels
        if args.segments:
            peak = torch.tensor([float(run.recorder.reading().peak_memory)], device=args.device)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            losses[f"{name}_peak"] = peak.item()
    return losses


if __name__ == "__main__":
    main()
