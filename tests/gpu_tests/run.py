"""The checks that need a GPU, in ten minutes at most where no kernel is compiled: run by scripts/gpu_test.sh.

Every section has processes of its own and a time limit. What it found until then counts, and the rest is not run, which
is no failure; ranks that hang fail before. Prints checks and figures of each section as a table, and writes all of them
to one JSON and one page. Without a GPU it names the sections, skips them, and succeeds.
With `--device cpu --tiny` all of its code runs on a CPU at sizes that measure nothing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
VERDICTS = {None: "not judged", True: "ok", False: "FAILED"}
NOT_RUN = "not run: "
OUT_OF_TIME = f"{NOT_RUN}time"
TIMED_OUT = 124  # of the program `timeout`
# Compiles its kernels when they are first called, for which every section has so many seconds more.
COMPILES, COMPILING = "flash_attn.cute", 300
# Relative; bf16 rounds to 3 digits, and fp32 sums differ in their order.
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}
# Of norms of gradients in bf16. A unit whose gradients are lost or counted twice changes them by more.
NORM_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Section:
    """What `run` checks within so many seconds; it returns checks and figures, as common.Report writes them."""

    title: str
    seconds: int
    run: Callable[["Suite"], dict]
    gpus: int = 1
    module: str = "torch"


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package around it
        return False


class Suite:
    """Starts the processes of the sections; `until` is when the time of the one that runs is over."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpu_test_"))
        self.device, self.tiny, self.until = device, tiny, 0.0
        self._flags = ["--device", device, *(["--tiny"] if tiny else [])]

    def script(self, name: str, *flags: str, ranks: int = 0, queues: int = 1) -> dict:
        """What one of the scripts beside this one found; under torchrun where `ranks` are asked for.

        `queues` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) are shared by the streams of a process.
        """
        output = self.folder / f"{name}{''.join(flags)}{ranks}-{queues}.json"
        start = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else [sys.executable]
        command = [*start, str(HERE / f"{name}.py"), *self._flags, "--output", str(output), *flags]
        problem, _ = self.process(command, queues)
        found = json.loads(output.read_text()) if output.exists() else {"checks": [], "figures": []}
        if problem:
            found["checks"].append(ended(" ".join([f"{name}.py", *flags]), problem))
        return found

    def process(self, command: list[str], queues: int = 1) -> tuple[str | None, str]:
        """Why it did not end well, or None; and what it printed."""
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "PYTHONWARNINGS": "ignore"}
        left = self.until - time.monotonic()
        if left <= 0:
            return OUT_OF_TIME, ""
        log = self.folder / "log"
        # torchrun is told to end its ranks, which have process groups of their own.
        limited = ["timeout", "--kill-after=20", str(left), *command]
        with log.open("w") as file:
            code = subprocess.run(limited, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
        text = log.read_text(errors="replace")
        if code == TIMED_OUT or code and time.monotonic() > self.until:
            return OUT_OF_TIME, text
        return f"exit code {code}: " + " ".join(text.strip().splitlines()[-3:])[-400:] if code else None, text


def check(name: str, passed: bool | None, found: str) -> dict:
    return {"name": name, "passed": passed, "found": found}


def ended(name: str, problem: str) -> dict:
    """The check of a process that did not end well."""
    return check(name, None if problem == OUT_OF_TIME else False, problem)


def verdict(found: dict) -> str:
    return "not run" if found["found"].startswith(NOT_RUN) else VERDICTS[found["passed"]]


def pipeline_ranks(suite: Suite) -> dict:
    """Four ranks on one GPU, over gloo, against Megatron's own run on one rank."""
    own = suite.script("ranks", "--segments", "0")
    variants = ("--segments", "4", "--variants", "1f1b,zb-h1,recompute,offload")
    return same_losses(own, suite.script("ranks", *variants, ranks=4), "4 pipeline ranks on one GPU")


def units(suite: Suite) -> dict:
    """One long sequence and seven short ones: losses of each alone, in less memory than packs take."""
    unequal = ("--unequal", "1")
    own = suite.script("ranks", "--segments", "0", *unequal)
    ours = suite.script("ranks", "--segments", "8", *unequal, "--variants", "units,packs", ranks=2)
    result = same_losses(own, ours, "2 pipeline ranks on one GPU")
    peaks = {figure["variant"]: figure["bfloat16_peak"] for figure in ours["figures"]}
    if len(peaks) == 2:
        ratio = peaks["units"] / max(peaks["packs"], 1)
        name = "units of an eighth of the longest sequence: less memory than packs"
        result["checks"].append(check(name, None if suite.tiny else ratio < 1, f"{ratio:.2f} of it"))
    return result


ALL_VARIANTS = "1f1b,chunks,zb-h1-chunks,offload"


def ranks_over_nccl(suite: Suite) -> dict:
    """A GPU for each rank, hardware queues as set by the launchers and as CUDA has them, chunks, messages of 16 MB in
    fp32 and 8 MB in bf16; and the time of a step with fewer thread blocks for messages."""
    sizes = ("--hidden", "64" if suite.tiny else "2048")
    own = suite.script("ranks", "--segments", "0", *sizes)
    result: dict = {"checks": [], "figures": []}
    runs = [(1, 4, ALL_VARIANTS), (8, 4, ALL_VARIANTS), (32, 4, ALL_VARIANTS), (32, 2, "1f1b")]
    for queues, ctas, names in runs[::3] if suite.tiny else runs:  # a CPU has no queues
        variants = ("--segments", "2", "--backend", "gloo" if suite.tiny else "nccl", *sizes)
        variants += ("--variants", names, "--ctas", str(ctas))
        found = suite.script("ranks", *variants, ranks=2, queues=queues)
        found = same_losses(own, found, f"2 ranks over NCCL, CUDA_DEVICE_MAX_CONNECTIONS={queues}, {ctas} CTAs")
        result = {name: [*result[name], *found[name]] for name in result}
    return result


def same_losses(own: dict, ours: dict, what: str) -> dict:
    """All that was found, and whether every variant of ours has the losses of Megatron's own run."""
    result = {"checks": own["checks"] + ours["checks"], "figures": own["figures"] + ours["figures"]}
    for figure in ours["figures"] if own["figures"] else ():
        for dtype, tolerance in LOSS_TOLERANCE.items():
            name = f"{what}, {figure['variant']}, {dtype}: losses of Megatron's own single rank"
            result["checks"].append(agree(name, figure[dtype], own["figures"][0][dtype], tolerance))
    return result


def agree(name: str, ours: list[float], own: list[float], tolerance: float) -> dict:
    """Numbers of consecutive steps."""
    if not own or len(ours) != len(own):
        return check(name, False, f"{len(ours)} numbers, {len(own)} of Megatron's own")
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, own, strict=True))
    found = f"{worst:.1e} apart, of {tolerance:.0e} allowed, over {len(own)} steps from {own[0]:.4f} to {own[-1]:.4f}"
    return check(name, worst <= tolerance, found)


# What a GPU needs to have installed for these is torch alone.
LOCAL = (
    *("--transformer-impl", "local", "--no-rope-fusion", "--no-gradient-accumulation-fusion"),
    *("--no-persist-layer-norm", "--no-masked-softmax-fusion"),
)
OWN = ("--attention-backend", "local")
SEGMENTS = ("--sequence-splits", "4")
TE = "transformer_engine_torch"


def training(suite: Suite) -> dict:
    """On one GPU: 4 segments, and activations on the host, against Megatron's own schedule and attention."""
    offload = [*LOCAL, *SEGMENTS, "--pipeline-schedule", "gpipe", "--offload-activations", "1"]
    return trained_alike(suite, [*LOCAL, *OWN], {"4 segments": [*LOCAL, *SEGMENTS], "offload": offload})


def te_training(suite: Suite) -> dict:
    """Its layers add weight gradients to `main_grad` themselves, and keep them back where the backward is split."""
    flags = ["--transformer-impl", "transformer_engine"]
    ours = {"4 segments": [*flags, *SEGMENTS], "zb-h1": [*flags, *SEGMENTS, "--pipeline-schedule", "zb-h1"]}
    return trained_alike(suite, flags, ours)


def training_on_eight(suite: Suite) -> dict:
    """Tensor and sequence parallelism in a pipeline of four; in two of two stages, gradients are reduced and parameters
    gathered meanwhile.
    """
    layers, attention = (["--transformer-impl", "transformer_engine"], []) if is_installed(TE) else (LOCAL, OWN)
    common = [*layers, *SEGMENTS, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    common += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    deep = [*common, "--pipeline-model-parallel-size", "4"]
    ours = {
        "PP 4": deep,
        "PP 4, zb-h1": [*deep, "--pipeline-schedule", "zb-h1"],
        "PP 2, DP 2": [*common, "--pipeline-model-parallel-size", "2"],
    }
    return trained_alike(suite, [*layers, *attention], ours, ranks=8)


def trained_alike(suite: Suite, own: list[str], ours: dict[str, list[str]], ranks: int = 1) -> dict:
    """pretrain_gpt.py in bf16: losses of each of `ours` on `ranks` beside those of `own` on one, and norms of gradients
    in the first two steps, which differ where the first of a run is special."""
    length, iterations = ("64", "3") if suite.tiny else ("2048", "10")
    flags = [
        *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
        *("--seq-length", length, "--max-position-embeddings", length, "--position-embedding-type", "rope"),
        *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", iterations, "--lr", "1e-3"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--bf16", "--mock-data"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--make-vocab-size-divisible-by", "64"),
        *("--disable-jit-fuser", "--num-workers", "0", "--log-interval", "1", "--eval-iters", "0"),
        *("--device", suite.device),
    ]

    def train(processes: int, more: list[str]) -> tuple[str | None, list[float], list[float]]:
        start = [*TORCHRUN, f"--nproc-per-node={processes}", str(ROOT / "pretrain_gpt.py")]
        problem, log = suite.process([*start, *flags, *more])
        losses, norms = (re.findall(rf"\b{name}: (\S+) \|", log) for name in ("lm loss", "grad norm"))
        return problem, list(map(float, losses)), list(map(float, norms[:2]))

    problem, weights = None, str(suite.folder / "weights")
    if ranks > 1:  # random weights depend on how layers lie on ranks
        problem, *_ = train(1, [*own, "--save", weights, "--save-interval", "1", "--train-iters", "1"])
        flags += ["--load", weights, "--finetune", "--distributed-timeout-minutes", "1"]
    if not problem:
        problem, losses, norms = train(1, own)
    if problem:
        return {"checks": [ended("Megatron's own schedule", problem)], "figures": []}
    checks, figures, tolerance = [], [{"own": losses, "norms": norms}], LOSS_TOLERANCE["bfloat16"]
    for name, more in ours.items():
        problem, our_losses, our_norms = train(ranks, more)
        figures.append({name: our_losses, "norms": our_norms})
        title = f"pretrain_gpt.py in bf16, {name}"
        if problem:
            checks.append(ended(title, problem))
            continue
        checks.append(agree(f"{title}: losses of Megatron's own schedule and attention", our_losses, losses, tolerance))
        checks.append(agree(f"{title}: norms of gradients in steps 1 and 2", our_norms, norms, NORM_TOLERANCE))
    return {"checks": checks, "figures": figures}


def script(*call: str) -> Callable[[Suite], dict]:
    return lambda suite: suite.script(*call)


SECTIONS = (
    Section("attention by segments is as exact as that of the whole, with dropout too", 65, script("attention_errors")),
    Section("four pipeline ranks on one GPU (gloo: NCCL refuses to share it) train as one does", 70, pipeline_ranks),
    Section("long and short sequences in units train as each alone does", 70, units),
    Section("pretrain_gpt.py trains on one GPU as with Megatron's own schedule", 50, training),
    Section(
        "Transformer Engine's layers train by segments as with Megatron's own schedule", 70, te_training, module=TE
    ),
    Section("two ranks over NCCL train as one does, with one hardware queue and with many", 150, ranks_over_nccl, 2),
    Section("eight GPUs train as one does: TP 2, PP 4, overlap", 180, training_on_eight, 8),
    Section("speed of attention by segments", 75, script("attention_speed")),
    Section("time and memory of a stage of the 2.7b model, the host's share", 85, script("stage", "--part", "time")),
    Section("time and memory of a stage whose activations wait on the host", 60, script("stage", "--part", "offload")),
    Section("time of a stage with experts, each with a wait of the host", 60, script("stage", "--part", "experts")),
    Section("longest sequence that fits a stage of the 2.7b model", 65, script("stage", "--part", "room")),
)


def page_of(result: dict) -> str:
    """Checks and figures of a section in Markdown."""
    lines = [f"## {result['title']} ({result['seconds']:.0f} s)", "", "| | check | found |", "|---|---|---|"]
    lines += [f"| {verdict(check)} | {check['name']} | {check['found']} |" for check in result["checks"]]
    figures = [json.dumps(figure) for figure in result["figures"]]
    lines += ["", "<details><summary>figures</summary>", "", "```", *figures, "```", "", "</details>", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which show only that the code runs")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="sections to run, counted from 1")
    parser.add_argument("--output", type=Path, default=Path("gpu_test.json"), help="default: gpu_test.json")
    args = parser.parse_args()
    sections = [s for i, s in enumerate(SECTIONS, 1) if not args.only or i in args.only]
    import torch

    gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    if args.device == "cuda" and not gpus:
        print("No GPU is visible, so nothing was checked. Skipped:")
        print("\n".join(f"  skipped  {section.title}" for section in sections))
        return
    name = f"{gpus} x {torch.cuda.get_device_name()}" if args.device == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}", flush=True)
    suite, results, pages = Suite(args.device, args.tiny), [], [f"# {name}, PyTorch {torch.__version__}\n"]
    for section in sections:
        has_gpus = section.gpus <= (2 if args.tiny else gpus)  # on a CPU two ranks are as good as two GPUs
        start = time.monotonic()
        if not has_gpus or not is_installed(section.module):
            lacking = section.module if has_gpus else f"{section.gpus} GPUs"
            found = {"checks": [check(section.title, None, f"{NOT_RUN}needs {lacking}")], "figures": []}
        else:
            limit = section.seconds * (12 if args.tiny else 1)  # a CPU that tests share
            limit += COMPILING * is_installed(COMPILES)
            print(f"{section.title}, at most {limit} s", flush=True)
            suite.until = start + limit
            found = section.run(suite)
        if not found["checks"]:
            found["checks"].append(check(section.title, False, "it found nothing"))
        results.append({"title": section.title, "seconds": time.monotonic() - start, **found})
        args.output.write_text(json.dumps({"device": name, "torch": torch.__version__, "sections": results}, indent=1))
        pages.append(page_of(results[-1]))
        print(pages[-1], flush=True)
        args.output.with_suffix(".md").write_text("\n".join(pages))
    verdicts = Counter(verdict(check) for result in results for check in result["checks"])
    print(", ".join(f"{number} {each}" for each, number in verdicts.items()))
    print(f"Written to {args.output}, and for an issue to {args.output.with_suffix('.md')}.")
    raise SystemExit(verdicts["FAILED"] > 0)


if __name__ == "__main__":
    main()
