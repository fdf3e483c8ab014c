"""What a benchmark compares: training steps of one model, and what is known of them."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.seq1f1b.costs.blocks import paper_flops
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.stage_costs import (
    A100,
    CPU_CORE,
    StageCost,
    action_costs,
    analytic_costs,
    bottleneck_time,
    read_traced_costs,
)
from megatron.seq1f1b.partition import Task, cut_sequence
from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation
from megatron.seq1f1b.schedule import Placement, ScheduleChoice, Shape, Span

from .model import Batch, build_model, delta_net
from .torch_pipeline import schedule_1f1b


@dataclass
class Variant:
    """A training step of a model to time. `executor`, `shape` and `lengths` are those of our own
    schedules.

    Measured, a value for each repeat: `seconds` and `cpu_seconds`, of the slowest rank; `spans` of one rank of each
    pipeline stage.
    """

    name: str
    schedule: str
    model: list[torch.nn.Module]
    step: Callable[[], None]
    executor: PipelineExecutor | None = None
    shape: Shape | None = None
    lengths: tuple[int, ...] = ()
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    spans: list[list[list[Span]]] = field(default_factory=list)


def variants(args: argparse.Namespace, model: list[torch.nn.Module], num_microbatches: int) -> list[Variant]:
    """All variants of the command line that this number of model chunks allows.

    Beside V-shaped chunks, which are ours alone, the others run on a model with one chunk on a rank.
    """
    batch = Batch(args)
    splits = _splits(args, len(model), num_microbatches)
    found = []
    whole = build_model(args, 1) if args.pipeline_placement == "v" and len(model) > 1 else model
    for schedule in args.pipeline_schedule:
        if _cannot_run(schedule, len(whole), num_microbatches):
            if dist.get_rank() == 0:
                print(f"left out, for it cannot run {num_microbatches} micro-batches here: {schedule}", flush=True)
        elif schedule == "megatron":
            name = "Megatron's own interleaved" if len(whole) > 1 else "Megatron's own 1F1B"
            step = _megatron_step(get_forward_backward_func(), args, whole, batch, num_microbatches)
            found.append(
                Variant(
                    name=name,
                    schedule=schedule,
                    model=whole,
                    step=step,
                )
            )
        elif schedule == "torch":
            found.append(
                Variant(
                    name="torch Schedule1F1B",
                    schedule=schedule,
                    model=whole,
                    step=schedule_1f1b(whole, batch, num_microbatches),
                )
            )
        else:
            for strategy, lengths in splits:
                found.append(ours(args, schedule, strategy, lengths, model, batch, num_microbatches))
    return found


def _cannot_run(schedule: str, num_chunks: int, num_microbatches: int) -> bool:
    """PyTorch's schedule and Megatron's interleaved one need a micro-batch for each rank, the latter a multiple."""
    num_ranks = parallel_state.get_pipeline_model_parallel_world_size()
    if schedule == "torch":
        return num_microbatches < num_ranks or num_chunks > 1
    return schedule == "megatron" and num_chunks > 1 and num_microbatches % num_ranks > 0


def ours(
    args: argparse.Namespace,
    schedule: str,
    strategy: str,
    lengths: tuple[int, ...],
    model: list[torch.nn.Module],
    batch: Batch,
    num_microbatches: int,
) -> Variant:
    """One of our schedules on segments of `lengths`."""
    name = schedule if len(lengths) == 1 else f"{schedule}, k = {len(lengths)}, {strategy}"
    layers = _layers_per_stage(args, len(model))
    name += ", V" if args.pipeline_placement == "v" and len(model) > 1 else ""
    shape = Shape(
        Placement(parallel_state.get_pipeline_model_parallel_world_size(), len(model), args.pipeline_placement),
        num_microbatches,
        len(lengths),
    )
    executor = PipelineExecutor(
        ScheduleChoice(schedule, args.pipeline_placement),
        Segmentation(len(lengths), lambda _: lengths),
        costs=lambda lengths: action_costs(_stage_costs(args, len(model)), layers, lengths),
    )
    step = _megatron_step(executor, args, model, batch, num_microbatches)
    return Variant(
        name=name,
        schedule=schedule,
        model=model,
        step=step,
        executor=executor,
        shape=shape,
        lengths=lengths,
    )


def _megatron_step(
    schedule: Callable, args: argparse.Namespace, model: list[torch.nn.Module], batch: Batch, num_microbatches: int
) -> Callable[[], None]:
    def step() -> None:
        schedule(
            forward_step_func=batch.forward_step,
            data_iterator=[iter([batch.as_dict()] * num_microbatches) for _ in model],
            model=model,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )

    return step


def _splits(args: argparse.Namespace, num_chunks: int, num_microbatches: int) -> list[tuple[str, tuple[int, ...]]]:
    """Strategies and the lengths of their segments, printed on the first rank; equal splits once."""
    found: dict[tuple[int, ...], str] = {}
    for num_segments in args.sequence_splits:
        for strategy in args.sequence_split_strategy:
            costs = _stage_costs(args, num_chunks, is_measured=strategy == "profile")
            lengths = cut_sequence(
                strategy,
                Task(
                    args.seq_length,
                    num_segments,
                    1 if args.context_parallel_size == 1 else 2 * args.context_parallel_size,
                    time=bottleneck_time(costs),
                    flops=paper_flops(model_shape(args)),
                    full_speed_rows=(A100 if torch.cuda.is_available() else CPU_CORE).full_speed_rows,
                    num_stages=len(costs),
                    num_microbatches=num_microbatches,
                ),
            )
            found[lengths] = f"{found[lengths]} = {strategy}" if lengths in found else strategy
    if dist.get_rank() == 0:
        for lengths, strategy in found.items():
            print(f"k = {len(lengths)}, {strategy}: {' '.join(map(str, lengths))}", flush=True)
    return [(strategy, lengths) for lengths, strategy in found.items()]


def _stage_costs(args: argparse.Namespace, num_chunks: int, is_measured: bool = True) -> Sequence[StageCost]:
    """By the trace, if there is one and `is_measured`, else analytic."""
    shape = model_shape(args)
    layers = _layers_per_stage(args, num_chunks)
    if is_measured and args.sequence_split_profile is not None:
        return read_traced_costs(args.sequence_split_profile, len(layers)).stages
    return analytic_costs(shape, layers, A100 if torch.cuda.is_available() else CPU_CORE)


def _layers_per_stage(args: argparse.Namespace, num_chunks: int) -> tuple[int, ...]:
    num_stages = parallel_state.get_pipeline_model_parallel_world_size() * num_chunks
    return (args.num_layers // num_stages,) * num_stages


def model_shape(args: argparse.Namespace) -> ModelShape:
    head_dim = args.hidden_size // args.num_attention_heads
    shape = ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=4 * args.hidden_size,
        num_heads=args.num_attention_heads,
        head_dim=head_dim,
        vocab_size=args.vocab_size,
    )
    if not args.hybrid_layer_pattern:
        return shape
    pattern = args.hybrid_layer_pattern.replace("|", "")
    return replace(shape, is_gated=True, pattern=pattern, delta_net=delta_net(args))
