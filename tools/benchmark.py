"""Time pipeline schedules side by side: one model, one process group, the variants in turn, medians of several repeats.

    torchrun --nproc-per-node 2 tools/benchmark.py

Every variant runs the same attention kernel, so that what differs is the schedule. The time of a step is that of the
slowest rank, from a common barrier to its end. For our schedules the table also shows how long the busiest rank
computed, that time with the bubble of the schedule, and how far the step is from it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron.seq1f1b import cpu

if not torch.cuda.is_available():
    cpu.activate()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.seq1f1b.model import use_segment_attention  # noqa: E402
from megatron.seq1f1b.partition import (  # noqa: E402
    A100,
    CPU_CORE,
    STRATEGIES,
    ModelShape,
    analytic_costs,
    check_profile,
    cut_sequence,
    read_profile,
)
from megatron.seq1f1b.runtime import PipelineExecutor  # noqa: E402
from megatron.seq1f1b.runtime.recorder import Recorder  # noqa: E402


class KeepsRecorder:
    """Takes the place of a Tracer: keeps the recorder of the latest step instead of writing a file."""

    def __init__(self) -> None:
        self.latest: Recorder | None = None

    @contextmanager
    def step(self, schedule, shape, group, device) -> Iterator[Recorder]:
        self.latest = Recorder(device)
        yield self.latest

    def busy_seconds(self) -> float:
        return sum(span.end - span.start for span in self.latest.spans())


@dataclass
class Variant:
    """A schedule to time; `ideal` is the number of unit times of a step over those of its compute."""

    name: str
    schedule: Callable
    recorder: KeepsRecorder | None = None
    ideal: float | None = None
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=512, help="small, so that the stages cost the same")
    parser.add_argument("--num-microbatches", type=int, default=2)
    parser.add_argument("--sequence-splits", type=int, nargs="+", default=[4], metavar="K")
    parser.add_argument("--sequence-split-strategy", nargs="+", choices=sorted(STRATEGIES), default=["uniform_comp"])
    parser.add_argument("--sequence-split-profile", metavar="JSON", help="measured costs, for the strategy profile")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> list[torch.nn.Module]:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=dist.get_world_size(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        args.vocab_size,
        args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model.to(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
    use_segment_attention([model])
    return [DistributedDataParallel(config, DistributedDataParallelConfig(), model)]


def variants(args: argparse.Namespace) -> list[Variant]:
    """Megatron's own 1F1B, ours on whole sequences, ours on segments."""
    shape = ModelShape(
        args.num_layers,
        args.hidden_size,
        4 * args.hidden_size,
        args.num_attention_heads,
        args.hidden_size // args.num_attention_heads,
        args.vocab_size,
    )
    found = [Variant("Megatron's own 1F1B", get_forward_backward_func())]
    splits = [(k, strategy) for k in args.sequence_splits for strategy in args.sequence_split_strategy]
    for k, strategy in [(1, "even"), *splits]:
        lengths = split(args, shape, strategy, k)
        recorder = KeepsRecorder()
        executor = PipelineExecutor("1f1b", k, lambda _, lengths=lengths: lengths, tracer=recorder)
        ideal = 1 + (dist.get_world_size() - 1) / (args.num_microbatches * k)
        found.append(Variant("1f1b" if k == 1 else f"k = {k}, {strategy}", executor, recorder, ideal))
    return found


def split(args: argparse.Namespace, shape: ModelShape, strategy: str, num_segments: int) -> tuple[int, ...]:
    """Lengths of the segments, printed on the first rank."""
    rates = A100 if torch.cuda.is_available() else CPU_CORE
    stages = [args.num_layers // dist.get_world_size()] * dist.get_world_size()
    costs = analytic_costs(shape, stages, rates)
    if args.sequence_split_profile is not None:
        profile = read_profile(args.sequence_split_profile)
        check_profile(profile, args.sequence_split_profile, shape, 1)
        costs = profile.costs(stages) if strategy == "profile" else costs
    elif strategy == "profile":
        costs = None
    lengths = cut_sequence(
        strategy, args.seq_length, num_segments, 1, shape, costs, rates.full_speed_rows, args.num_microbatches
    )
    if dist.get_rank() == 0:
        print(f"k = {num_segments}, {strategy}: {' '.join(map(str, lengths))}", flush=True)
    return lengths


def run_step(args: argparse.Namespace, model: list[torch.nn.Module], variant: Variant) -> float:
    """Seconds of one step on the slowest rank."""
    tokens = torch.randint(args.vocab_size, (1, args.seq_length + 1), generator=torch.Generator().manual_seed(1)).cuda()
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(args.seq_length, device=tokens.device)[None],
    }

    def forward_step(data_iterator, chunk):
        part = next(data_iterator)
        output = chunk(part["tokens"], part["position_ids"], None, labels=part["labels"])
        return output, lambda losses: (losses.sum(), torch.tensor(losses.numel(), device=losses.device), {})

    model[0].zero_grad_buffer()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    variant.schedule(
        forward_step_func=forward_step,
        data_iterator=iter([batch] * args.num_microbatches),
        model=model,
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=1,
        forward_only=False,
    )
    torch.cuda.synchronize()
    return maximum(time.perf_counter() - start)


def maximum(value: float) -> float:
    """Over all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64).cuda()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def table(timed: list[Variant]) -> str:
    """One line per variant: seconds, ratio to the first, and for ours how far the step is from its compute."""
    lines = [f"{'schedule':24}{'s/step':>10}{'ratio':>8}{'busiest rank':>14}{'x bubble':>10}{'step over that':>16}"]
    first = statistics.median(timed[0].seconds)
    for variant in timed:
        seconds = statistics.median(variant.seconds)
        line = f"{variant.name:24}{seconds:10.3f}{seconds / first:8.3f}"
        if variant.busy:
            busy = statistics.median(variant.busy)
            bound = busy * variant.ideal
            line += f"{busy:14.3f}{bound:10.3f}{seconds / bound:16.3f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    args = parse()
    dist.init_process_group()
    parallel_state.initialize_model_parallel(1, dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    model, timed = build_model(args), variants(args)
    is_first = dist.get_rank() == 0
    for variant in timed:
        run_step(args, model, variant)
    for repeat in range(args.repeats):
        for variant in timed:
            variant.seconds.append(run_step(args, model, variant))
            if variant.recorder:
                variant.busy.append(maximum(variant.recorder.busy_seconds()))
            if is_first:
                print(f"repeat {repeat + 1}/{args.repeats}  {variant.name}: {variant.seconds[-1]:.3f} s", flush=True)
    if is_first:
        print(
            f"\n{dist.get_world_size()} pipeline ranks, {args.num_microbatches} micro-batches of {args.seq_length} "
            f"tokens, {args.num_layers} layers, hidden {args.hidden_size}; medians of {args.repeats}\n\n{table(timed)}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
