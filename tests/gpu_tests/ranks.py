"""Losses of a few steps of a small GPT: on the pipeline ranks that torchrun started.

Over gloo they share one GPU; over NCCL they do if there are fewer GPUs than ranks and NCCL allows it. With
`--segments 0` it is Megatron's own run on one rank, with its own attention and schedule; otherwise every one of
`--variants` runs in turn. With `--unequal` a step has one long and some short sequences: Megatron's own run takes each
alone, ours puts them into units.
"""

from gpu_tests.common import (  # before Megatron
    Report,
    parser,
    patience,
    start_megatron,
    synchronise,
    use_own_or_shared_gpu,
)

# isort: split
import argparse
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection

from functional_tests.equality.cases import Layout
from functional_tests.equality.layout import named, sizes_of
from functional_tests.equality.models import Model
from megatron.seq1f1b.launch.v_chunks import at_stage, building
from megatron.seq1f1b.partition import even, packs_of_step
from megatron.seq1f1b.process.patches import patched
from megatron.seq1f1b.runtime import ActivationMemory, PipelineExecutor, Repacking, Segmentation, message_groups
from megatron.seq1f1b.schedule import Placement, ScheduleChoice

LAYERS, VOCABULARY, MICROBATCHES, STEPS = 8, 256, 4, 3
FEWEST_HEADS, WIDEST_HEAD = 4, 128  # FlashAttention takes heads up to 256


class Variant(NamedTuple):
    """What our run of the model differs in."""

    schedule: str = "1f1b"
    chunks: int = 1
    style: str = "looped"
    recomputes: bool = False
    offloaded: float = 0.0  # the share of activations that waits on the host
    packs: bool = False  # units as long as the longest sequence


VARIANTS = {
    "1f1b": Variant(),
    "zb-h1": Variant(schedule="zb-h1"),
    "recompute": Variant(recomputes=True),
    "chunks": Variant(chunks=2),
    "zb-h1-chunks": Variant(schedule="zb-h1", chunks=2),
    "v": Variant(schedule="auto", chunks=2, style="v"),
    "offload": Variant(offloaded=1.0),
    "units": Variant(),
    "packs": Variant(packs=True),
}
# Parts of the longest sequence.
UNEQUAL = (1, 3, 5, 7, 7, 30, 50, 60)


def build(args: argparse.Namespace, length: int, dtype: torch.dtype, variant: Variant) -> list[GPTModel]:
    """The model chunks of this rank; a layer has the same weights on any number of ranks and chunks."""
    placement = Placement(dist.get_world_size(), variant.chunks, variant.style)
    heads = max(FEWEST_HEADS, args.hidden // WIDEST_HEAD)
    model = Model(
        dtype,
        LAYERS,
        heads,
        kv_heads=heads // 2,
        recompute="full" if variant.recomputes else None,
        per_token_loss=args.unequal,
    ).but(hidden_size=args.hidden, kv_channels=args.hidden // heads, bf16=dtype is torch.bfloat16)
    config = model.transformer_config(**sizes_of(Layout(dist.get_world_size(), variant.chunks)))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    found = []
    for chunk, stage in enumerate(placement.stages_of(dist.get_rank())):
        with patched(building(placement, stage)):
            model_chunk = GPTModel(
                config,
                get_gpt_layer_local_spec(),
                VOCABULARY,
                length,
                pre_process=stage == 0,
                post_process=stage == placement.num_stages - 1,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                vp_stage=chunk if variant.chunks > 1 else None,
                pg_collection=at_stage(placement, stage, groups),
            )
        found.append(model_chunk)
    return with_weights(found, args, dtype)


def with_weights(chunks: list[GPTModel], args: argparse.Namespace, dtype: torch.dtype) -> list[GPTModel]:
    """The model chunks on the device, with weights that are drawn by the names of parameters: the same on any number of
    ranks and chunks, and each time."""
    with torch.no_grad():
        for name, parameter in named(chunks):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            # The scores of attention have a spread of 1, whatever the hidden size is.
            parameter.copy_(noise / args.hidden**0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    # Norms are made in 32 bit, and no kernel of a GPU mixes types; Megatron casts whole models, too.
    return [chunk.to(args.device, dtype) for chunk in chunks]


def executor_of(args: argparse.Namespace, length: int, variant: Variant) -> PipelineExecutor:
    """The schedule of `variant`; all that this program knows of the executor's constructor."""
    cut = partial(even, num_segments=args.segments)
    segmentation = Segmentation(args.segments, cut)
    if args.unequal:
        unit = length if variant.packs else length // args.segments

        def pack(lengths, replicas, equal_counts):
            return packs_of_step(lengths, unit, replicas=replicas, equal_counts=equal_counts)

        segmentation = Repacking(pack)
    schedule = ScheduleChoice(variant.schedule, variant.style)
    activations = ActivationMemory(offloads=variant.offloaded)
    return PipelineExecutor(schedule, segmentation, activations=activations, timeout=patience(args.device))


def forward_step(data_iterator: Iterator, model: GPTModel) -> tuple:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple:
        total, count = losses.float().sum(), torch.full((), losses.numel(), device=losses.device)
        return total, count, {"loss": torch.stack([total.detach(), count])}

    return output, loss


def batches(length: int, step: int, args: argparse.Namespace) -> list:
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


def is_watched(args: argparse.Namespace) -> bool:
    """Whether waits of the host raise, in all steps but the first. Over gloo messages make it wait; for units, which
    are planned from the lengths of all ranks, an exchange before the step does."""
    return args.device == "cuda" and args.backend == "nccl" and args.segments > 0 and not args.unequal


@contextmanager
def no_wait_of_the_host() -> Iterator[None]:
    """Inside, whatever makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Measured(NamedTuple):
    losses: list[float]  # of every step; empty on ranks without the loss
    seconds: float  # of a step, the first one left out: it makes communicators and loads kernels
    peak: int  # bytes above those between steps, in the last step


def train(schedule: Callable, chunks: list[GPTModel], length: int, args: argparse.Namespace) -> Measured:
    """A few steps of gradient descent."""
    losses, seconds, peak = [], [], 0
    for step in range(2 if args.tiny else STEPS):
        for chunk in chunks:
            chunk.zero_grad()
        micro_batches = [batches(length, step, args) for _ in chunks]
        iterators = [iter(each) for each in micro_batches]
        synchronise(args.device)
        torch.cuda.reset_peak_memory_stats()  # else the peak would be that of an earlier variant
        allocated = torch.cuda.memory_allocated()
        start = time.perf_counter()
        with no_wait_of_the_host() if step and is_watched(args) else nullcontext():
            reports = schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=len(micro_batches[0]),
                seq_length=length,
                micro_batch_size=1,
                forward_only=False,
            )
        synchronise(args.device)
        seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() - allocated
        with torch.no_grad():
            for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
                parameter.sub_(parameter.grad, alpha=0.05 / (length if args.unequal else 1))
        if reports:
            total, count = torch.stack([report["loss"].double() for report in reports]).sum(0).tolist()
            losses.append(total / count)
    return Measured(losses, statistics.median(seconds[1:]), peak)


def of_all_ranks(measured: Measured) -> Measured:
    """The losses of the rank that has them, the longest step and the highest peak."""
    gathered: list[Measured] = [measured] * dist.get_world_size()
    dist.all_gather_object(gathered, measured)
    return Measured(
        losses=next((each.losses for each in gathered if each.losses), []),
        seconds=max(each.seconds for each in gathered),
        peak=max(each.peak for each in gathered),
    )


def of_all_dtypes(args: argparse.Namespace, variant: Variant) -> dict[str, Any]:
    """Losses, seconds and peak."""
    length = 64 if args.tiny else 4096
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build(args, length, dtype, variant)
        schedule = executor_of(args, length, variant) if args.segments else forward_backward_no_pipelining
        measured = of_all_ranks(train(schedule, model, length, args))
        name = str(dtype).removeprefix("torch.")
        found[name] = measured.losses
        found[f"{name}_seconds"] = measured.seconds
        found[f"{name}_peak"] = measured.peak
    return found


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--segments", type=int, default=0)
    flags.add_argument("--unequal", action="store_true")
    flags.add_argument("--variants", default="1f1b")
    flags.add_argument("--backend", default="gloo")
    flags.add_argument("--hidden", type=int, default=128)
    flags.add_argument("--ctas", type=int, default=message_groups.MAX_CTAS, help="thread blocks of an NCCL message")
    args = flags.parse_args()
    message_groups.MAX_CTAS = args.ctas
    if args.device == "cuda":
        use_own_or_shared_gpu()
    report = Report(args.output)
    for name in args.variants.split(","):
        variant = VARIANTS[name]
        start_megatron(args.device, args.backend, variant.chunks)
        found = of_all_dtypes(args, variant)
        if dist.get_rank() == 0:
            report.figure("pipelines", variant=name, ctas=args.ctas, watched=is_watched(args), **found)
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
