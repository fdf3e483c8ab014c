#!/usr/bin/env python3
"""The longest sequence that trains a step in a given memory, for each of several methods: a table and a picture.

    python tools/benchmark_longest.py --output docs/images/longest.svg

Two pipeline ranks on this machine's CPU run pretrain_gpt.py for one step, optimizer included, with sequences of mock
data that double until a rank runs out of memory, and then by bisection. Every method runs the same attention kernel,
so that what differs is what is kept. Before that all methods train the shortest sequence: their losses must be equal.

A rank may allocate --memory GiB beyond what it has after its imports, which are shared: RLIMIT_DATA, the kernel's
limit of private writable memory, is set to what the process has plus that. Weights, gradients, the state of the
optimizer and the stacks of threads (1 MiB each) count.
"""

import argparse
import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import re
import resource
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

SCRIPT = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"
FULL = ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")
SEGMENTS = ("--sequence-splits 16", "--sequence-split-strategy even")
WHOLE_LOSS = ("--keep-logits",)
# Name -> flags.
METHODS: Mapping[str, tuple[str, ...]] = {
    "Megatron's 1F1B": (),
    "Megatron's 1F1B, full recomputation": FULL,
    "Seq1F1B": (*SEGMENTS, *WHOLE_LOSS),
    "Seq1F1B, full recomputation": (*SEGMENTS, *WHOLE_LOSS, *FULL),
    "Seq1F1B, loss in pieces": SEGMENTS,
    "Seq1F1B, loss in pieces, activations on the host": (*SEGMENTS, "--offload-activations 1"),
    "Seq1F1B, loss in pieces, all but attention recomputed": (*SEGMENTS, *FULL, "--recompute-keeps-attention"),
}
IMPORTED = (
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.tokenizers.text.libraries",
    "megatron.seq1f1b.launch.executors",
    "megatron.seq1f1b.launch.training_loop",
    "megatron.training",
)
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|MemoryError|bad_alloc|out of memory"
    r"|memory of this host|no memory left|want of memory",  # the sentences of process/
    re.I,
)
LOSS = re.compile(r"lm loss: (\S+) \|")
PEAK = re.compile(r"^peak (\d+)$", re.MULTILINE)
SECONDS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
PIECE = 1 << 22  # logits: 16 MiB and not 256, since all is small here; their loss is in pieces from 8 pieces on
# Of malloc.h.
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
STACK = 1 << 20  # bytes of a thread, of which a rank has dozens


class Step(NamedTuple):
    """A step that fits: its length in tokens, loss, seconds, and bytes resident at most beyond what is shared."""

    length: int
    loss: float
    seconds: float
    peak: int


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--memory", type=float, default=0.6, metavar="GIB", help="of each rank, beyond its imports; default: 0.6")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help="default: all")
    add("--shortest", type=int, default=512, metavar="TOKENS", help="a multiple of 16; default: 512")
    add("--resolution", type=float, default=0.06, help="of the longest length, as a share of it; default: 0.06")
    add("--num-layers", type=int, default=8)
    add("--hidden-size", type=int, default=256)
    add("--num-attention-heads", type=int, default=4)
    add("--num-query-groups", type=int, default=1)
    add("--vocab-size", type=int, default=32000)
    add("--num-microbatches", type=int, default=2)
    add("--timeout", type=float, default=1800, metavar="SECONDS", help="of one step; default: 1800")
    add("--output", type=Path, metavar="FILE", help="the picture, a .svg or .png (needs matplotlib)")
    return parser.parse_args(argv)


def flags_of(args: argparse.Namespace, method: str, length: int) -> list[str]:
    model = (
        f"--num-layers {args.num_layers} --hidden-size {args.hidden_size} --normalization RMSNorm "
        f"--num-attention-heads {args.num_attention_heads} --position-embedding-type rope --disable-bias-linear "
        f"--group-query-attention --num-query-groups {args.num_query_groups} "
        f"--seq-length {length} --max-position-embeddings {length} --untie-embeddings-and-output-weights "
        f"--vocab-size {args.vocab_size} --attention-dropout 0 --hidden-dropout 0"
    )
    run = (
        f"--device cpu --pipeline-model-parallel-size 2 --micro-batch-size 1 "
        f"--global-batch-size {args.num_microbatches} --train-iters 1 --lr 1e-3 --eval-iters 0 --log-interval 1 "
        "--mock-data --tokenizer-type NullTokenizer --num-workers 0 --no-create-attention-mask-in-dataloader"
    )
    return " ".join((model, run, *METHODS[method])).split()


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    from megatron.seq1f1b.platform import cpu

    cpu.activate()
    for name in IMPORTED:
        importlib.import_module(name)
    check_losses([tried(args, method, args.shortest) for method in args.methods], args)
    found = {}
    start = args.shortest
    for method in args.methods:
        found[method] = longest(lambda length, method=method: tried(args, method, length), start, args.resolution)
        start = found[method].length
        print(f"{method}: {found[method].length} tokens", file=sys.stderr, flush=True)
    print(table(found))
    if args.output is not None:
        plot(found, args)


def check_losses(steps: Sequence[Step | None], args: argparse.Namespace) -> None:
    """Raise SystemExit if a method lacks memory for the shortest sequence, or has another loss."""
    for method, step in zip(args.methods, steps, strict=True):
        if step is None:
            raise SystemExit(f"error: --memory {args.memory:g} is too little for --shortest {args.shortest}: {method}")
        if abs(step.loss - steps[0].loss) > 1e-6 * steps[0].loss:
            raise SystemExit(f"error: the loss is {step.loss} with {method}, {steps[0].loss} with {args.methods[0]}")
    print(f"All losses of {args.shortest} tokens: {steps[0].loss}", file=sys.stderr, flush=True)


def longest(try_length: Callable[[int], Step | None], start: int, resolution: float) -> Step:
    """The longest step that fits, up to a share `resolution` of its length; lengths are multiples of 16.

    `start` is a length near it, and some shorter length fits.
    """
    found = None
    too_long = None
    length = start
    while found is None or too_long is None:
        step = try_length(length)
        found, too_long = (step, too_long) if step else (found, length)
        length = (2 * length if step else length // 2) // 16 * 16
    while too_long - found.length > max(16, resolution * found.length):
        middle = (found.length + too_long) // 2 // 16 * 16
        step = try_length(middle)
        found, too_long = (step, too_long) if step else (found, middle)
    return found


def tried(args: argparse.Namespace, method: str, length: int) -> Step | None:
    """A step of this length, or None if a rank ran out of memory. Raises SystemExit if it failed otherwise."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp()  # a TemporaryDirectory would be deleted by the ranks when they exit
    log = Path(folder, "log")
    context = multiprocessing.get_context("fork")
    flags = flags_of(args, method, length)
    memory = int(args.memory * 2**30)
    ranks = [context.Process(target=run_rank, args=(rank, flags, port, log, memory)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + args.timeout
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < until:
        ended = multiprocessing.connection.wait([rank.sentinel for rank in ranks if rank.is_alive()], 1)
        if ended and any(rank.exitcode for rank in ranks):
            until = min(until, time.monotonic() + 20)  # the other rank ends by itself, or waits for ever
    for rank in ranks:
        rank.kill()
        rank.join()
    text = log.read_text(errors="replace")
    shutil.rmtree(folder)
    if not any(rank.exitcode for rank in ranks) and LOSS.search(text):
        step = Step(
            length=length,
            loss=float(LOSS.search(text)[1]),
            seconds=float(SECONDS.search(text)[1]) / 1e3,
            peak=max(peaks(text)),
        )
        print(f"{method}, {length} tokens: {step.seconds:.1f} s, {step.peak >> 20} MiB", file=sys.stderr, flush=True)
        return step
    if OUT_OF_MEMORY.search(text):
        print(f"{method}, {length} tokens: out of memory", file=sys.stderr, flush=True)
        return None
    raise SystemExit(f"{text[-3000:]}\nerror: {method} fails with {length} tokens")


def peaks(text: str) -> list[int]:
    return [int(number) for number in PEAK.findall(text)] or [0]


def run_rank(rank: int, flags: Sequence[str], port: int, log: Path, memory: int) -> None:
    """Train one step as a rank of two, with `memory` bytes."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    os.chdir(log.parent)
    sys.path[0] = str(SCRIPT.parent)
    sys.argv = [str(SCRIPT), *flags]
    from megatron.training import initialize, training

    from megatron.seq1f1b.launch import executors

    executors.PIECE = PIECE
    initialize._warmup_jit_function = lambda *_, **__: None  # it computes the feed-forward block of a whole sequence
    training.setup_model_and_optimizer = with_fused_attention(training.setup_model_and_optimizer)
    library = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)
    library.mallopt(M_ARENA_MAX, 1)
    library.mallopt(M_MMAP_THRESHOLD, 1 << 18)  # what is freed leaves the process at once
    library.pthread_attr_init(attributes)
    library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK))
    library.pthread_setattr_default_np(attributes)
    has = {name: status(name) for name in ("VmData", "VmRSS")}
    limit = has["VmData"] + memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    atexit.register(lambda: print(f"\npeak {status('VmHWM') - has['VmRSS']}", flush=True))
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # as the interpreter does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:  # a fork of multiprocessing does not
        atexit._run_exitfuncs()


def with_fused_attention(set_up: Callable) -> Callable:
    """Megatron's own schedules, too, compute attention without keeping scores, as they do on a GPU."""
    from megatron.seq1f1b import use_segment_attention

    def wrapped(*args: Any, **options: Any) -> Any:
        chunks, optimizer, scheduler = set_up(*args, **options)
        use_segment_attention(chunks)
        return chunks, optimizer, scheduler

    return wrapped


def status(name: str) -> int:
    """Bytes by the name that /proc/self/status gives them."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def table(found: Mapping[str, Step]) -> str:
    first = next(iter(found.values())).length
    lines = ["| method | longest sequence | of the first | step | resident |", "|---|---|---|---|---|"]
    for method, step in found.items():
        ratio = f"{step.length / first:.1f}"
        lines.append(f"| {method} | {step.length:,} | {ratio} | {step.seconds:.0f} s | {step.peak / 2**20:.0f} MiB |")
    return "\n".join(lines)


def plot(found: Mapping[str, Step], args: argparse.Namespace) -> None:
    from megatron.seq1f1b.report.style import picture

    with picture(args.output, 8, 0.4 * len(found) + 0.9) as figure:
        axes = figure.subplots()
        lengths = [step.length for step in found.values()]
        colours = ["#b0b7c0" if "Megatron" in name else "#7da7d9" for name in found]
        axes.bar_label(axes.barh(list(found), lengths, color=colours), [f"{length:,}" for length in lengths], padding=3)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(lengths))
        axes.set_xlabel(f"longest sequence in {args.memory:g} GiB on each of two ranks, tokens")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
