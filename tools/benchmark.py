#!/usr/bin/env python3
"""Time pipeline schedules side by side: one model, one process group, the variants in turn, medians of several repeats.

    torchrun --nproc-per-node 2 tools/benchmark.py --pipeline-schedule megatron 1f1b --num-microbatches 2 1

`megatron` is Megatron's own schedule, `torch` is Schedule1F1B of torch.distributed.pipelining on the same model, all
others are values of --pipeline-schedule. Every variant runs the same attention kernel, so that what differs is the
schedule. The time of a step is that of the slowest rank, from a common barrier to its end, without optimizer.

In the table, `ratio` is to the first line, repeat by repeat, with its standard error; `CPU s` the processor time of the
busiest process. For our schedules: `busiest` is how long the busiest rank computed, `x bubble` that time with the
bubble of 1F1B, times 1 + (P - 1) / (m k C), and `simulated` the schedule on the measured times of its actions with
messages that take no time; `over it` is how far the step is from either.
"""

from benchmarking.device import parser_of, start  # before Megatron

# isort: split
import argparse
import logging
import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarking.model import build_model, use_ranks
from benchmarking.results import table, write_profiles
from benchmarking.variants import Variant, variants
from megatron.seq1f1b.partition import STRATEGIES
from megatron.seq1f1b.schedule import FAMILY_NAMES, PLACEMENTS


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--pipeline-schedule",
        nargs="+",
        choices=["megatron", "torch", *sorted(FAMILY_NAMES)],
        default=["megatron", "1f1b"],
        metavar="NAME",
        help="what to compare, the first with the others: %(choices)s; default: megatron 1f1b",
    )
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument(
        "--hybrid-layer-pattern",
        metavar="PATTERN",
        help="a hybrid model instead of a GPT, its layers by Megatron's symbols, a | between stages: G-G-|G-*- has "
        "three gated delta nets for one attention layer; --num-layers follows from it",
    )
    parser.add_argument("--num-microbatches", type=int, nargs="+", default=[2], metavar="M", help="a table for each")
    parser.add_argument("--context-parallel-size", type=int, default=1, metavar="N", help="ranks of each stage")
    chunks = "model chunks on a rank; a table each"
    name = "--num-virtual-stages-per-pipeline-rank"
    parser.add_argument(name, dest="num_chunks", type=int, nargs="+", default=[1], metavar="C", help=chunks)
    parser.add_argument(
        "--pipeline-placement",
        choices=PLACEMENTS,
        default="looped",
        help="of several model chunks; beside V-shaped ones, Megatron's own schedule has one chunk on a rank",
    )
    parser.add_argument("--sequence-splits", type=int, nargs="+", default=[1, 4], metavar="K", help="of our schedules")
    parser.add_argument("--sequence-split-strategy", nargs="+", choices=sorted(STRATEGIES), default=["balanced"])
    parser.add_argument("--sequence-split-profile", metavar="FILE.json", help="a trace, for the strategy profile")
    parser.add_argument("--profile", type=Path, metavar="FILE.json", help="write the measured times of F, B, I and W")
    args = parser.parse_args()
    num_ranks, rest = divmod(int(os.environ.get("WORLD_SIZE", 1)), args.context_parallel_size)
    if rest:
        parser.error(f"--context-parallel-size {args.context_parallel_size} does not divide the number of ranks")
    if "torch" in args.pipeline_schedule and args.context_parallel_size > 1:
        parser.error("torch.distributed.pipelining runs the model without context parallelism; leave out torch")
    if "profile" in args.sequence_split_strategy and args.sequence_split_profile is None:
        parser.error("--sequence-split-strategy profile needs --sequence-split-profile, a trace by --pipeline-trace")
    if args.hybrid_layer_pattern:
        stages = args.hybrid_layer_pattern.split("|")
        args.num_layers = sum(map(len, stages))
        if len(set(map(len, stages))) > 1 or args.num_chunks != [len(stages) // num_ranks]:
            parser.error(
                "--hybrid-layer-pattern needs stages of equally many layers, one for every model chunk of a rank"
            )
    for chunks in args.num_chunks:
        if args.num_layers % (chunks * num_ranks):
            parser.error(f"--num-layers {args.num_layers} cannot be spread evenly with {chunks} model chunks on a rank")
    return args


def run_step(variant: Variant) -> None:
    """Run one step and add what is measured to the variant."""
    for chunk in variant.model:
        chunk.zero_grad_buffer()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    began_cpu = time.process_time()
    variant.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    cpu_seconds = time.process_time() - began_cpu
    measured = [None] * dist.get_world_size()
    dist.all_gather_object(measured, (seconds, cpu_seconds, variant.executor and variant.executor.recorder.spans()))
    seconds, cpu_seconds, spans = zip(*measured, strict=True)
    variant.seconds.append(max(seconds))
    variant.cpu_seconds.append(max(cpu_seconds))
    if variant.executor:
        variant.spans.append(list(spans[:: parallel_state.get_context_parallel_world_size()]))


def compare(args: argparse.Namespace, num_chunks: int, num_microbatches: int) -> list[Variant]:
    """Time all variants of one layout in turn; the first round warms up."""
    use_ranks(num_chunks if args.pipeline_placement == "looped" else 1, args.context_parallel_size)
    model = build_model(args, num_chunks, args.pipeline_placement)
    timed = variants(args, model, num_microbatches)
    for repeat in range(args.repeats + 1):
        for variant in timed:
            run_step(variant)
            if dist.get_rank() == 0:
                round_ = f"repeat {repeat}/{args.repeats}" if repeat else "warm-up"
                print(f"{round_}  {variant.name}: {variant.seconds[-1]:.3f} s", flush=True)
    for variant in timed:
        for values in (variant.seconds, variant.cpu_seconds, variant.spans):
            del values[:1]
    return timed


def main() -> None:
    args = parse()
    logging.disable(logging.INFO)
    start()
    tables = []
    everything = []
    for num_chunks in args.num_chunks:
        for num_microbatches in args.num_microbatches:
            timed = compare(args, num_chunks, num_microbatches)
            everything += timed
            title = f"{num_microbatches} micro-batches, model chunks on a rank: {num_chunks}"
            title += " in a V" if args.pipeline_placement == "v" and num_chunks > 1 else ""
            tables.append(f"{title}\n{table(timed)}")
    if dist.get_rank() == 0:
        print(
            f"\n{_ranks(args.context_parallel_size)}, micro-batches of one sequence of {args.seq_length} tokens, "
            f"{args.hybrid_layer_pattern or args.num_layers} layers, hidden {args.hidden_size}; "
            f"medians of {args.repeats}\n"
        )
        print("\n\n".join(tables))
        if args.profile:
            names = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")
            model = {"device": device(), "model": {name: getattr(args, name) for name in names}}
            write_profiles(everything, model, args.profile)
            print(f"\n{args.profile} written.")
    dist.destroy_process_group()


def _ranks(context_parallel_size: int) -> str:
    stages = f"{dist.get_world_size() // context_parallel_size} pipeline ranks"
    return stages if context_parallel_size == 1 else f"{stages} of {context_parallel_size} context-parallel ranks"


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}"


if __name__ == "__main__":
    main()
