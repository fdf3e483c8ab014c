#!/usr/bin/env python3
"""Steps of a policy loss in verl, side by side: Megatron's own schedule, and segments.

    bash scripts/frameworks.sh verl --collect-only
    .venv-verl/bin/torchrun --nproc-per-node 2 tools/benchmark_posttraining.py

Lengths of rollouts are log-normal around --median tokens, the longest set to --longest. verl's engine, unmodified,
packs them into micro-batches of at most --micro-batch-tokens (its dynamic batching), and runs forward, loss, backward
and optimizer. `Megatron's own` is Megatron's 1F1B on whole packs with attention document by document; all run the same
attention kernel. Steps are medians of the slowest rank, `ratio` is to the first line, repeat by repeat; `CPU s` is the
processor time of the busiest rank. Peaks are bytes of live tensors in a step, without weights.
tests/frameworks/verl_engine.py says what verl's engine needs on a CPU.
"""

from benchmarking.device import start  # before Megatron

# isort: split
import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from frameworks.installed import installed
from frameworks.live_bytes import LiveBytes
from frameworks.models import save_qwen
from frameworks.own_attention import OWN_ATTENTION
from frameworks.verl_engine import Case, engine_of, loss_of, rollouts
from megatron.seq1f1b.process.patches import patched

VOCABULARY = 512


@dataclass
class Variant:
    """A way to run steps: `schedule()` is entered around each.

    Measured: the most bytes of live tensors by rank; of each repeat seconds and processor seconds of the slowest rank.
    """

    name: str
    schedule: Callable[[], AbstractContextManager]
    engine: Any
    peaks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8, help="of a step")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--median", type=int, default=384, help="tokens of a response")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the logarithm")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest rollout")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096, help="verl's max_token_len_per_gpu")
    parser.add_argument(
        "--segment-tokens", type=int, nargs="+", default=[512, 1024], metavar="N", help="a row for each"
    )
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.longest > args.micro_batch_tokens:
        parser.error("--longest: a rollout fits into no micro-batch; give as many --micro-batch-tokens")
    return args


def lengths_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Tokens of prompt and response of each rollout."""
    random = Random(1)
    most = args.longest - args.prompt
    drawn = (random.lognormvariate(0, args.spread) * args.median for _ in range(args.rollouts - 1))
    return [(args.prompt, most), *((args.prompt, max(1, min(most, int(length)))) for length in drawn)]


def variants(args: argparse.Namespace, folder: Path) -> list[Variant]:
    """Each has an engine of its own, since ours replaces attention in the model."""
    schedules: dict[str, Callable[[], AbstractContextManager]] = {"Megatron's own": partial(patched, [OWN_ATTENTION])}
    for tokens in args.segment_tokens:
        schedules[f"segments of {tokens}"] = partial(installed, segment_tokens=tokens)
    found = []
    for name, schedule in schedules.items():
        with redirect_stdout(None):  # verl prints its configuration
            sizes = {"pipeline_model_parallel_size": dist.get_world_size()}
            engine = engine_of(folder, Case("token-mean", sizes=tuple(sizes.items())))
        found.append(Variant(name, schedule, engine))
    return found


def step(variant: Variant, data: Any) -> tuple[float, float]:
    """Seconds of one step of verl's, and processor seconds, each of the slowest rank."""
    with variant.schedule(), variant.engine.train_mode():
        dist.barrier()
        began = time.perf_counter()
        began_cpu = time.process_time()
        variant.engine.train_batch(data, loss_of("token-mean"))
        seconds = gathered(time.perf_counter() - began)
        cpu_seconds = gathered(time.process_time() - began_cpu)
    return max(seconds), max(cpu_seconds)


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def data_of(args: argparse.Namespace, lengths: list[tuple[int, int]], step: int) -> Any:
    from verl.utils import tensordict_utils as tu

    data = rollouts(lengths, VOCABULARY, step)
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=True,
        global_batch_size=len(lengths),
        use_dynamic_bsz=True,
        max_token_len_per_gpu=args.micro_batch_tokens,
    )
    return data


def table(compared: list[Variant], tokens: int) -> str:
    rows = [f"{'':20} {'s/step':>8} {'tokens/s':>9} {'ratio':>6} {'CPU s':>6} {'peak MB by rank':>16}"]
    for variant in compared:
        seconds = statistics.median(variant.seconds)
        pairs = zip(compared[0].seconds, variant.seconds, strict=True)
        ratio = statistics.median(own / mine for own, mine in pairs)
        peaks = " ".join(f"{peak / 2**20:.1f}" for peak in variant.peaks)
        busy = statistics.median(variant.cpu_seconds)
        rows.append(f"{variant.name:20} {seconds:8.2f} {tokens / seconds:9.0f} {ratio:6.2f} {busy:6.2f} {peaks:>16}")
    return "\n".join(rows)


def main() -> None:
    args = parse()
    logging.disable(logging.WARNING)  # frameworks warn much
    start()
    is_first = dist.get_rank() == 0
    folders = [tempfile.mkdtemp() if is_first else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    if is_first:
        save_qwen(folder, VOCABULARY, args.num_layers, args.hidden_size, args.longest)
    dist.barrier()
    compared = variants(args, folder)
    lengths = lengths_of(args)
    tokens = sum(map(sum, lengths))
    for repeat in range(args.repeats + 1):
        data = data_of(args, lengths, repeat)
        for variant in compared:
            if repeat == 0:
                # The first step warms up; what counts tensors slows it.
                with LiveBytes() as memory:
                    step(variant, data)
                variant.peaks = gathered(memory.peak)
                continue
            seconds, cpu_seconds = step(variant, data)
            variant.seconds.append(seconds)
            variant.cpu_seconds.append(cpu_seconds)
            if is_first:
                print(f"repeat {repeat}/{args.repeats}  {variant.name}: {seconds:.2f} s", flush=True)
    if is_first:
        print(
            f"\n{dist.get_world_size()} pipeline ranks, {len(lengths)} rollouts of a median of "
            f"{args.prompt + args.median} tokens, the longest {args.longest}, {tokens} tokens in all, micro-batches of "
            f"at most {args.micro_batch_tokens}; {args.num_layers} layers, hidden {args.hidden_size}; medians of "
            f"{args.repeats}\n"
        )
        print(table(compared, tokens))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
