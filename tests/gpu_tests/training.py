"""The sections of the suite that start pretrain_gpt.py: losses and norms beside those of Megatron's own schedule."""

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from gpu_tests.suite import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    ROOT,
    TORCHRUN,
    Found,
    Suite,
    agree,
    is_installed,
    passed_of,
)

# What a GPU needs to have installed for these is torch alone.
LOCAL = (
    *("--transformer-impl", "local", "--no-rope-fusion", "--no-gradient-accumulation-fusion"),
    *("--no-persist-layer-norm", "--no-masked-softmax-fusion"),
)
OWN = ("--attention-backend", "local")
SEGMENTS = ("--sequence-splits", "4")
TE = "transformer_engine_torch"
WARMING_UP = 2  # iterations, not counted in tokens/s


def local(suite: Suite) -> Found:
    """On one GPU: 4 segments, and activations on the host, against Megatron's own schedule and attention."""
    ours = {
        "4 segments": [*LOCAL, *SEGMENTS],
        "offload": [*LOCAL, *SEGMENTS, "--pipeline-schedule", "gpipe", "--offload-activations", "1"],
    }
    return trained_alike(suite, "one GPU", [*LOCAL, *OWN], ours)


def transformer_engine(suite: Suite) -> Found:
    """Its layers add weight gradients to `main_grad` themselves, and keep them back where the backward is split."""
    flags = ["--transformer-impl", "transformer_engine"]
    ours = {"4 segments": [*flags, *SEGMENTS], "zb-h1": [*flags, *SEGMENTS, "--pipeline-schedule", "zb-h1"]}
    return trained_alike(suite, "Transformer Engine", flags, ours)


def on_eight(suite: Suite) -> Found:
    """Tensor and sequence parallelism in a pipeline of four; in two of two stages, gradients are reduced and parameters
    gathered meanwhile.
    """
    layers, attention = LOCAL, OWN
    if is_installed(TE):
        layers, attention = ("--transformer-impl", "transformer_engine"), ()
    common = [*layers, *SEGMENTS, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    common += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    deep = [*common, "--pipeline-model-parallel-size", "4"]
    ours = {
        "PP 4": deep,
        "PP 4, zb-h1": [*deep, "--pipeline-schedule", "zb-h1"],
        "PP 2, DP 2": [*common, "--pipeline-model-parallel-size", "2"],
    }
    return trained_alike(suite, "eight GPUs", [*layers, *attention], ours, ranks=8)


class Trained(NamedTuple):
    """A run of pretrain_gpt.py, by its log."""

    problem: str | None
    losses: list[float]
    norms: list[float]
    tokens_per_second: float | None  # beside the other runs: no measure of speed


def trained_alike(suite: Suite, what: str, own: Sequence[str], ours: dict[str, list[str]], ranks: int = 1) -> Found:
    """pretrain_gpt.py in bf16: losses of each of `ours` on `ranks` beside those of `own` on one, and norms of gradients
    in the first two steps, which differ where the first of a run is special. Runs on one rank go side by side."""
    length, iterations = (64, 3) if suite.tiny else (8192, 10)
    batch = 4
    flags = [
        *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
        *("--seq-length", str(length), "--max-position-embeddings", str(length), "--position-embedding-type", "rope"),
        *("--micro-batch-size", "1", "--global-batch-size", str(batch), "--train-iters", str(iterations)),
        *("--lr", "1e-3", "--attention-dropout", "0", "--hidden-dropout", "0", "--bf16", "--mock-data"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--make-vocab-size-divisible-by", "64"),
        *("--disable-jit-fuser", "--num-workers", "0", "--log-interval", "1", "--eval-iters", "0"),
        *("--device", suite.device),
    ]

    def train(name: str, processes: int, more: Sequence[str]) -> Trained:
        command = [*TORCHRUN, f"--nproc-per-node={processes}", str(ROOT / "pretrain_gpt.py"), *flags, *more]
        log = re.sub(r"\W+", "-", f"pretrain_gpt {what} {name}")
        ended = suite.process(log, command, ranks=processes)
        steps = [value / 1e3 for value in numbers(ended.log, r"elapsed time per iteration \(ms\)")]
        counted = steps[WARMING_UP:]
        return Trained(
            problem=ended.problem,
            losses=numbers(ended.log, "lm loss"),
            norms=numbers(ended.log, "grad norm")[:2],
            tokens_per_second=batch * length * len(counted) / sum(counted) if counted else None,
        )

    found = Found()
    if ranks > 1:  # random weights depend on how layers lie on ranks
        weights = str(suite.folder / "weights")
        saved = train("weights", 1, [*own, "--save", weights, "--save-interval", "1", "--train-iters", "1"])
        if saved.problem:
            found.check("Megatron's own schedule", passed_of(saved.problem), saved.problem)
            return found
        flags += ["--load", weights, "--finetune", "--distributed-timeout-minutes", "1"]
    starts = [partial(train, "own", 1, own)]
    starts += [partial(train, name, ranks, more) for name, more in ours.items()]
    if ranks == 1:
        reference, *runs = suite.beside(*starts)
    else:  # each has all GPUs
        reference, *runs = [start() for start in starts]
    for name, run in zip(["Megatron's own schedule", *ours], (reference, *runs), strict=True):
        found.figures.append({"table": "training", "on": what, "run": name, "tokens": length, **run._asdict()})
    if reference.problem:
        found.check("Megatron's own schedule", passed_of(reference.problem), reference.problem)
        return found
    for name, run in zip(ours, runs, strict=True):
        title = f"pretrain_gpt.py in bf16, {length} tokens, {name}"
        if run.problem:
            found.check(title, passed_of(run.problem), run.problem)
            continue
        losses = f"{title}: losses of Megatron's own schedule and attention"
        norms = f"{title}: norms of gradients in steps 1 and 2"
        found.checks.append(agree(losses, run.losses, reference.losses, LOSS_TOLERANCE["bfloat16"]))
        found.checks.append(agree(norms, run.norms, reference.norms, NORM_TOLERANCE))
    return found


def numbers(log: str, name: str) -> list[float]:
    """The values of `name` in Megatron's lines of iterations."""
    return [float(value) for value in re.findall(rf"\b{name}: (\S+) \|", log)]
