#!/usr/bin/env python3
"""Hold the simulator against this machine: eight steps, predicted from the times of single actions in other runs.

    torchrun --nproc-per-node 2 tools/benchmark_prediction.py --seq-length 4096 --hidden-size 128 --repeats 9

For one and for two model chunks, runs of zb-h1 on one micro-batch in one to sixteen equal segments are the profile:
what their forwards, input and weight gradients take by length and prefix, stage by stage. Other families, numbers of
segments and of micro-batches, and ways to cut are then simulated on it, message by message, and timed in turn with it.
"""

from benchmarking.device import parser_of, start  # before Megatron

# isort: split
import argparse
import logging
import statistics
import time

import torch
import torch.distributed as dist

from benchmark import run_step
from benchmarking.model import Batch, build_model, use_ranks
from benchmarking.prediction import predicted_seconds, table
from benchmarking.profile import profile_of
from benchmarking.variants import Variant, model_shape, ours
from megatron.seq1f1b.costs.blocks import paper_flops
from megatron.seq1f1b.costs.stage_costs import A100, CPU_CORE, analytic_costs, bottleneck_time
from megatron.seq1f1b.partition import Task, cut_sequence

_PROFILES = tuple(("zb-h1", "even", segments, 1) for segments in (1, 2, 4, 8, 16))
# By number of model chunks: schedule, strategy, segments, micro-batches.
CONFIGURATIONS = {
    1: (
        ("1f1b", "even", 1, 4),
        ("1f1b", "even", 4, 2),
        ("1f1b", "balanced", 4, 1),
        ("1f1b", "balanced", 8, 2),
        ("gpipe", "uniform_comp", 2, 2),
        ("zb-h1", "balanced", 4, 3),
    ),
    2: (("1f1b", "balanced", 4, 2), ("breadth-first", "even", 2, 2)),
}
# What `ours` and the model read of the arguments of the other benchmark.
_FIXED = {
    "pipeline_schedule": ["zb-h1"],
    "pipeline_placement": "looped",
    "context_parallel_size": 1,
    "sequence_split_profile": None,
}


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, seq_length=4096, hidden_size=128)
    parser.set_defaults(repeats=9)
    return argparse.Namespace(**_FIXED, **vars(parser.parse_args()))


def cut(args: argparse.Namespace, strategy: str, num_segments: int, num_stages: int) -> tuple[int, ...]:
    """By the formulas, as training cuts."""
    device = A100 if torch.cuda.is_available() else CPU_CORE
    shape = model_shape(args)
    layers = (args.num_layers // num_stages,) * num_stages
    time = bottleneck_time(analytic_costs(shape, layers, device))
    rows = device.full_speed_rows
    return cut_sequence(
        strategy, Task(args.seq_length, num_segments, time=time, flops=paper_flops(shape), full_speed_rows=rows)
    )


def message_seconds(args: argparse.Namespace, repeats: int = 20) -> float:
    """Half of the median time there and back of the output of a segment, between the first two ranks."""
    tensor = torch.zeros(args.seq_length // 4, 1, args.hidden_size, device=torch.cuda.current_device())
    rank = dist.get_rank()
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        for sender in (0, 1) if rank < 2 else ():
            if rank == sender:
                dist.send(tensor, 1 - sender)
            else:
                dist.recv(tensor, sender)
        seconds.append((time.perf_counter() - began) / 2)
    found = [statistics.median(seconds)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def compare(args: argparse.Namespace, num_chunks: int) -> list[tuple[str, float, float]]:
    """Name, measured and predicted seconds; the first round warms up."""
    use_ranks(num_chunks)
    model = build_model(args, num_chunks)
    batch = Batch(args)
    num_stages = num_chunks * dist.get_world_size()
    timed: list[tuple[str, Variant]] = []
    for schedule, strategy, segments, microbatches in (*_PROFILES, *CONFIGURATIONS[num_chunks]):
        lengths = cut(args, strategy, segments, num_stages)
        variant = ours(args, schedule, strategy, lengths, model, batch, microbatches)
        timed.append((f"{variant.name}, m = {microbatches}, C = {num_chunks}", variant))
    for _ in range(args.repeats + 1):
        for _, variant in timed:
            run_step(variant)
    for _, variant in timed:
        for values in (variant.seconds, variant.cpu_seconds, variant.spans):
            del values[:1]
    profiled = timed[: len(_PROFILES)]
    others = timed[len(_PROFILES) :]
    profile = profile_of([variant for _, variant in profiled])
    message = message_seconds(args)
    return [
        (name, statistics.mean(variant.seconds), predicted_seconds(variant, profile, message))
        for name, variant in others
    ]


def main() -> None:
    args = parse()
    logging.disable(logging.INFO)
    start()
    rows = [row for num_chunks in CONFIGURATIONS for row in compare(args, num_chunks)]
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {args.seq_length} tokens, {args.num_layers} layers, hidden "
            f"{args.hidden_size}; means of {args.repeats}\n\n{table(rows)}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
