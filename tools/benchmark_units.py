#!/usr/bin/env python3
"""Steps of a few long sequences and many short ones, side by side: padded, packed, packed and cut, and in units.

    torchrun --nproc-per-node 2 tools/benchmark_units.py --sequences 96 --longest 4096 --unit-tokens 512
    PYTHONPATH=../Megatron-LM torchrun --nproc-per-node 2 tools/benchmark_units.py --replicas 2 --leave-out-padded

Lengths are log-normal around --median tokens, the longest set to --longest, as in sets for fine-tuning (99.89 % of
those of Llama 3 have less than 1k tokens, the longest 128k; arXiv 2407.21783, table 7). `padded`: each
sequence has --longest tokens. `packed`: as many as fit share a sequence of --longest tokens (best fit), kept apart, in
Megatron's order. `packed, cut`: the same in segments of --unit-tokens. `units`: --unit-tokens. `dp_balanced`, if
Megatron has it, as its main does: packs as its scheduler of that name makes them for all replicas, each as long as its
sequences together. All run the same kernels. Tokens are those of the data alone; steps are medians, without optimizer,
of the slowest rank. CPU seconds are those of the busiest rank, which other programs on the machine delay less.
"""

from benchmarking.device import parser_of, start  # before Megatron

# isort: split
import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets import data_schedule

from benchmarking.model import build_model, use_ranks
from megatron.seq1f1b.files.timeline_file import write_timeline
from megatron.seq1f1b.partition import Pack, even, packs_of_step, work_by_flops
from megatron.seq1f1b.runtime import PipelineExecutor, Repacking, Segmentation
from megatron.seq1f1b.schedule import Placement, ScheduleChoice, Shape, Timeline

Batch = dict[str, torch.Tensor]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=int, default=96, help="of a step")
    parser.add_argument("--median", type=int, default=64, help="tokens")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the logarithm")
    parser.add_argument("--longest", type=int, nargs="+", default=[4096], metavar="TOKENS", help="a table for each")
    parser.add_argument("--unit-tokens", type=int, default=512)
    parser.add_argument("--replicas", type=int, default=1, help="of the pipeline, that share the ranks")
    parser.add_argument("--seed", type=int, default=1, help="of the lengths")
    parser.add_argument("--pipeline-schedule", default="1f1b")
    parser.add_argument("--recompute", action="store_true", help="keep the input of each stage alone")
    parser.add_argument("--leave-out-padded", action="store_true", help="it takes longest")
    parser.add_argument("--timelines", type=Path, metavar="DIR", help="write the last step of each")
    return parser.parse_args()


def sequences(args: argparse.Namespace, longest: int) -> list[Batch]:
    random = Random(args.seed)
    lengths = [random.lognormvariate(0, args.spread) * args.median for _ in range(args.sequences - 1)]
    lengths = [longest, *(max(1, min(longest, int(length))) for length in lengths)]
    random.shuffle(lengths)
    generator = torch.Generator().manual_seed(1)
    return [_sequence(torch.randint(args.vocab_size, (length + 1,), generator=generator)) for length in lengths]


def _sequence(tokens: torch.Tensor) -> Batch:
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "loss_mask": torch.ones(len(tokens) - 1),
        "position_ids": torch.arange(len(tokens) - 1),
    }


def filled(some: Sequence[Batch], length: int) -> Batch:
    """One sequence of `length` tokens."""
    batch = {}
    for name in some[0]:
        row = torch.cat([sequence[name] for sequence in some])
        batch[name] = torch.cat([row, row.new_zeros(length - len(row))])[None]
    bounds = [0, *accumulate(len(sequence["tokens"]) for sequence in some)]
    bounds += [length] if bounds[-1] < length else []
    return batch | {"cu_seqlens": torch.tensor([bounds], dtype=torch.int32)}


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    part = next(batches)
    output = model(part["tokens"], part["position_ids"], None, labels=part["labels"])

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        return (losses * part["loss_mask"]).sum(), part["loss_mask"].sum().int(), {}

    return output, loss_func


def dp_balanced(lengths: Sequence[int], replicas: int, longest: int) -> list[list[Pack]]:
    """The packs of each replica, as Megatron's scheduler makes them."""
    scheduler = data_schedule.DpBalancedScheduler(longest, 1, replicas, None)
    rounds = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    return [
        [Pack(tuple(round_[replica]), (sum(lengths[number] for number in round_[replica]),)) for round_ in rounds]
        for replica in range(replicas)
    ]


def variants(args: argparse.Namespace, longest: int) -> dict[str, tuple[PipelineExecutor, list]]:
    """Executors and batches of this replica, by name."""
    replica = parallel_state.get_data_parallel_rank()
    found = sequences(args, longest)
    most = args.unit_tokens
    [packs] = packs_of_step([len(sequence["tokens"]) for sequence in found], longest)
    packed = [filled([found[number] for number in pack.sequences], longest) for pack in packs[replica :: args.replicas]]
    k = longest // most
    work = work_by_flops(24 * args.hidden_size**2, 4 * args.hidden_size)

    def pack(lengths: Sequence[int], replicas: int, equal_counts: bool) -> list[list[Pack]]:
        return packs_of_step(lengths, most, replicas=replicas, work=work, equal_counts=equal_counts)

    def pack_as_megatron(lengths: Sequence[int], replicas: int, equal_counts: bool) -> list[list[Pack]]:
        return dp_balanced(lengths, replicas, longest)

    own = found[replica :: args.replicas]
    make = partial(PipelineExecutor, ScheduleChoice(args.pipeline_schedule))
    whole = Segmentation(packed=True)
    cut = Segmentation(k, lambda length, *_: even(length, k), packed=True)
    named = {
        "packed": (make(whole), packed),
        "packed, cut": (make(cut), packed),
        "units": (make(Repacking(pack)), [own]),
    }
    if hasattr(data_schedule, "DpBalancedScheduler"):
        named["dp_balanced"] = make(Repacking(pack_as_megatron)), [own]
    if not args.leave_out_padded:
        named["padded"] = make(whole), [filled([sequence], longest) for sequence in own]
    return named


def step(executor: PipelineExecutor, batches: list, longest: int, model: list[torch.nn.Module]) -> tuple[float, float]:
    """Seconds of the slowest rank, and CPU seconds of the busiest one."""
    for chunk in model:
        chunk.zero_grad_buffer()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    cpu_began = time.process_time()
    executor(
        forward_step_func=forward_step,
        data_iterator=[iter(batches)],
        model=model,
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=1,
    )
    torch.cuda.synchronize()
    own = time.perf_counter() - began, time.process_time() - cpu_began
    of_ranks: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return max(seconds for seconds, _ in of_ranks), max(cpu_seconds for _, cpu_seconds in of_ranks)


def compare(args: argparse.Namespace, longest: int) -> list[str]:
    """The rows of a table."""
    args.seq_length = longest
    use_ranks(1, replicas=args.replicas)
    model = build_model(args, 1)
    model[0].config.calculate_per_token_loss = True
    if args.recompute:
        block = model[0].module.decoder.config
        block.recompute_granularity = "full"
        block.recompute_method = "uniform"
        block.recompute_num_layers = args.num_layers // parallel_state.get_pipeline_model_parallel_world_size()
    compared = variants(args, longest)
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in compared}
    for repeat in range(args.repeats + 1):
        for name, (executor, batches) in compared.items():
            last, busiest = step(executor, batches, longest, model)
            if repeat:  # the first warms up
                seconds[name].append(last)
                cpu_seconds[name].append(busiest)
            if dist.get_rank() == 0:
                when = f"repeat {repeat}/{args.repeats}" if repeat else "warm-up"
                print(f"{when}  {name}: {last:.3f} s, {busiest:.3f} s of CPU", flush=True)
    tokens = sum(len(sequence["tokens"]) for sequence in sequences(args, longest))
    rows = [f"longest {longest}, {tokens} tokens in all"]
    rows.append(
        f"{'':12} {'s/step':>8} {'CPU s':>8} {'tokens/s':>9} {'ratio':>6} {'bubble %':>8} {'peak MB by rank':>16}"
    )
    for name, (executor, _) in compared.items():
        readings = [None] * dist.get_world_size()
        dist.all_gather_object(readings, executor.recorder.reading())
        pairs = zip(seconds["packed"], seconds[name], strict=True)
        median = statistics.median(seconds[name])
        ratio = statistics.median(packed / own for packed, own in pairs)
        longest_step = max(reading.duration for reading in readings)
        bubble = 1 - statistics.fmean(reading.busy for reading in readings) / longest_step
        peaks = " ".join(f"{reading.peak_memory / 2**20:.0f}" for reading in readings)
        times = f"{median:8.3f} {statistics.median(cpu_seconds[name]):8.3f}"
        rows.append(f"{name:12} {times} {tokens / median:9.0f} {ratio:6.2f} {100 * bubble:8.1f} {peaks:>16}")
        if args.timelines:
            write(args, executor, name, longest)
    return rows


def write(args: argparse.Namespace, executor: PipelineExecutor, name: str, longest: int) -> None:
    spans = [None] * dist.get_world_size()
    dist.all_gather_object(spans, executor.recorder.spans())
    last: dict[int, int] = {}
    for span in spans[0]:
        last[span.action.microbatch] = max(last.get(span.action.microbatch, 0), span.action.segment)
    shape = Shape.of(Placement(len(spans)), [last[number] + 1 for number in range(len(last))])
    if dist.get_rank() == 0:
        args.timelines.mkdir(parents=True, exist_ok=True)
        timeline = Timeline(
            shape=shape,
            ranks=tuple(map(tuple, spans)),
            time_unit="s",
            meta={"schedule": f"{args.pipeline_schedule}, {name}"},
        )
        write_timeline(timeline, args.timelines / f"{name.replace(', ', '-')}-{longest}.json")


def main() -> None:
    args = parse()
    start()
    tables = [compare(args, longest) for longest in args.longest]
    if dist.get_rank() == 0:
        print(
            f"\n{dist.get_world_size()} ranks, {args.replicas} replicas, {args.sequences} sequences of a median of "
            f"{args.median} tokens, units of {args.unit_tokens}, {args.num_layers} layers, hidden {args.hidden_size}; "
            f"medians of {args.repeats}"
        )
        print("\n" + "\n\n".join("\n".join(rows) for rows in tables))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
