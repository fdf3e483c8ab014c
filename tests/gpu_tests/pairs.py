"""Forwards beside backwards (--overlap-moe-expert-parallel-comm) on two ranks that share the experts of a small GPT.

Losses of a few steps with pairs are those without. Then a step is timed with pairs, without, and without an exchange:
what the exchange takes, and the share of it that pairs hide. Over NCCL two ranks share one GPU, if there is one only:
then they also share its time, so the share says little.
"""

from gpu_tests.common import (  # before Megatron
    Report,
    dtype_of,
    parser,
    patience,
    start_megatron,
    synchronise,
    use_own_or_shared_gpu,
)

# isort: split
import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from functional_tests.equality.models import Model
from gpu_tests.ranks import VOCABULARY, batches, forward_step, with_weights
from gpu_tests.suite import LOSS_TOLERANCE, agree
from megatron.seq1f1b.partition import even
from megatron.seq1f1b.process.patches import Patch, patched
from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation
from megatron.seq1f1b.schedule import ScheduleChoice

LAYERS, HEADS, EXPERTS, STEPS, REPEATS = 4, 8, 8, 3, 5
# Tokens that are computed at once, where speed is measured: few enough for two ranks on one GPU, and enough to keep the
# host ahead of it.
TOKENS, TINY_TOKENS = 4096, 16


def build(args: argparse.Namespace, length: int, dtype: torch.dtype) -> GPTModel:
    """All layers, and of each the experts of this rank, with the same weights each time."""
    model = Model(dtype, LAYERS, HEADS, kv_heads=HEADS).but(
        hidden_size=args.hidden,
        kv_channels=args.hidden // HEADS,
        bf16=dtype is torch.bfloat16,
        add_bias_linear=False,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=2 * args.hidden,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall",
    )
    config = model.transformer_config(expert_model_parallel_size=dist.get_world_size())
    found = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=EXPERTS),
        VOCABULARY,
        length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    [found] = with_weights([found], args, dtype)
    return found


def executor_of(args: argparse.Namespace, segments: int, pairs: bool) -> PipelineExecutor:
    segmentation = Segmentation(segments, partial(even, num_segments=segments))
    return PipelineExecutor(ScheduleChoice("1f1b", pairs=pairs), segmentation, timeout=patience(args.device))


def run(executor: Callable, model: GPTModel, length: int, args: argparse.Namespace) -> list[dict]:
    """The reports of a step of this rank's micro-batches, the same in each."""
    model.zero_grad()
    micro_batches = batches(length, dist.get_rank(), args)
    return executor(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=length,
        micro_batch_size=1,
        forward_only=False,
    )


def losses(executor: Callable, model: GPTModel, length: int, args: argparse.Namespace) -> list[float]:
    """Of a few steps of gradient descent, the mean of both ranks."""
    found = []
    for _ in range(STEPS):
        reports = run(executor, model, length, args)
        with torch.no_grad():
            for parameter in model.parameters():
                if getattr(parameter, "allreduce", True):  # not of an expert, which one rank has
                    dist.all_reduce(parameter.grad)
                parameter.sub_(parameter.grad, alpha=0.02 / length)
        total = torch.stack([report["loss"].double() for report in reports]).sum(0)
        dist.all_reduce(total)
        found.append((total[0] / total[1]).item())
    return found


def seconds(executor: PipelineExecutor, model: GPTModel, length: int, args: argparse.Namespace) -> float:
    """Of a step, by its events on the slower rank, the median of some; the first warms up."""
    found = []
    for repeat in range(1 + (1 if args.tiny else REPEATS)):
        dist.barrier()
        run(executor, model, length, args)
        synchronise(args.device)
        if repeat:
            durations = [0.0] * dist.get_world_size()
            dist.all_gather_object(durations, executor.recorder.reading().duration)
            found.append(max(durations))
    return statistics.median(found)


def keeping_tokens(output: torch.Tensor, sent: torch.Tensor, **_: object) -> None:
    """In place of an exchange: experts compute on as many tokens, those of this rank."""
    rows = min(len(output), len(sent))
    output[:rows] = sent[:rows]
    output[rows:] = 0


WITHOUT_EXCHANGE = (Patch("torch.distributed.all_to_all_single", keeping_tokens, "tells what an exchange takes"),)


def check_losses(args: argparse.Namespace, segments: int, length: int, dtype: torch.dtype, report: Report) -> None:
    of_runs = []
    for pairs in (True, False):
        model = build(args, length, dtype)
        of_runs.append(losses(executor_of(args, segments, pairs), model, length, args))
    if dist.get_rank() == 0:
        name = str(dtype).removeprefix("torch.")
        cut = f"{segments} segments" if segments > 1 else "whole sequences"
        what = f"{cut}, {name}: losses with forwards beside backwards are those without"
        report.check(**agree(what, *of_runs, LOSS_TOLERANCE[name]))


def time_exchange(args: argparse.Namespace, segments: int, length: int, report: Report) -> None:
    model = build(args, length, dtype_of(args.device))
    paired = seconds(executor_of(args, segments, pairs=True), model, length, args)
    alone = seconds(executor_of(args, segments, pairs=False), model, length, args)
    with patched(WITHOUT_EXCHANGE):
        without_exchange = seconds(executor_of(args, segments, pairs=False), model, length, args)
    exchange = alone - without_exchange
    if dist.get_rank() == 0:
        report.figure(
            "pairs",
            length=length,
            segments=segments,
            seconds_with_pairs=paired,
            seconds_alone=alone,
            seconds_without_exchange=without_exchange,
            hidden_share=(alone - paired) / exchange if exchange > 0 else None,
        )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--backend", default="gloo")
    args = flags.parse_args()
    args.hidden = 64 if args.tiny else 1024
    args.segments = 0  # a micro-batch is a batch of its own
    args.unequal = False
    tokens = TINY_TOKENS if args.tiny else TOKENS
    if args.device == "cuda":
        use_own_or_shared_gpu()
    start_megatron(args.device, args.backend, expert_parallel=True)
    report = Report(args.output)
    for segments in (1, 4):
        for dtype in (torch.float32, torch.bfloat16):
            check_losses(args, segments, 4 * TINY_TOKENS if args.tiny else TOKENS, dtype, report)
    for segments in (1, 4):
        time_exchange(args, segments, segments * tokens, report)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
