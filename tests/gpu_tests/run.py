"""The checks that need a GPU, in eight minutes at most: run by scripts/gpu_test.sh.

Every section is a process of its own with a time limit; what it found until then counts. Writes one JSON with all
checks and figures, and prints a table of the checks. Without a GPU it names the sections, skips them, and succeeds.
With `--device cpu --tiny` all of its code runs on a CPU at sizes that measure nothing.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
VERDICTS = {None: "not judged", True: "ok", False: "FAILED"}
# What a section says about itself, among all that Megatron says.
MARKED = re.compile("  · ")
# Relative; bf16 rounds to 3 digits, and fp32 sums differ in their order.
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}


@dataclass(frozen=True)
class Section:
    """What `run` checks within so many seconds; it returns checks and figures, as common.Report writes them."""

    title: str
    seconds: int
    run: Callable[["Suite", float], dict]


class Suite:
    """Starts the processes of the sections."""

    def __init__(self, device: str, tiny: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpu_test_"))
        self.device = device
        self._flags = ["--device", device, *(["--tiny"] if tiny else [])]
        self.tiny = tiny

    def script(self, name: str, deadline: float, *flags: str, ranks: int = 0) -> dict:
        """What one of the scripts beside this one found; under torchrun where `ranks` are asked for."""
        output = self._folder / f"{name}{''.join(flags)}{ranks}.json"
        start = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else [sys.executable]
        problem, _ = self.process(
            [*start, str(HERE / f"{name}.py"), *self._flags, "--output", str(output), *flags], deadline
        )
        found = json.loads(output.read_text()) if output.exists() else {"checks": [], "figures": []}
        if problem:
            found["checks"].append({"name": " ".join([f"{name}.py", *flags]), "passed": False, "found": problem})
        return found

    def process(self, command: list[str], deadline: float) -> tuple[str | None, str]:
        """Why it did not end well, or None; and what it printed, which is shown meanwhile."""
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
        log = self._folder / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )
        shown, problem = 0, None
        while problem is None:
            code = process.poll()
            text = log.read_text(errors="replace")
            *whole, rest = text[shown:].split("\n")
            for line in filter(MARKED.match, whole):
                print(line, flush=True)
            shown = len(text) - len(rest)
            if code == 0:
                break
            if code is not None:
                problem = f"exit code {code}: " + " ".join(text.strip().splitlines()[-3:])[-400:]
            elif time.monotonic() > deadline:
                problem = "its time was up"
            else:
                time.sleep(0.2)
        if process.poll() is None:
            _end(process)
        if problem:
            print(f"  {problem}", flush=True)
        return problem, log.read_text(errors="replace")


def _end(process: subprocess.Popen) -> None:
    """Ask first: torchrun then ends its ranks, which have process groups of their own and hold the GPU's memory."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pipeline_ranks(suite: Suite, deadline: float) -> dict:
    """Four ranks on one GPU, over gloo, against Megatron's own run on one rank."""
    own = suite.script("ranks", deadline, "--segments", "0")
    ours = suite.script("ranks", deadline, "--segments", "4", ranks=4)
    result = {"checks": own["checks"] + ours["checks"], "figures": own["figures"] + ours["figures"]}
    if own["figures"] and ours["figures"]:
        for dtype, tolerance in LOSS_TOLERANCE.items():
            pairs = list(zip(ours["figures"][0][dtype], own["figures"][0][dtype], strict=True))
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            result["checks"].append(
                {
                    "name": f"4 pipeline ranks on one GPU, 4 segments, {dtype}: losses of Megatron's own single rank",
                    "passed": worst <= tolerance,
                    "found": f"{worst:.1e} apart, of {tolerance:.0e} allowed",
                }
            )
    return result


def training(suite: Suite, deadline: float) -> dict:
    """pretrain_gpt.py on one GPU in bf16: 4 segments against Megatron's own schedule and attention."""
    length = "64" if suite.tiny else "2048"
    flags = [
        *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
        *("--seq-length", length, "--max-position-embeddings", length, "--position-embedding-type", "rope"),
        *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "10", "--lr", "1e-3"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--bf16", "--transformer-impl", "local"),
        *("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
        *("--no-masked-softmax-fusion", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"),
        *(
            "--disable-jit-fuser",
            "--num-workers",
            "0",
            "--log-interval",
            "1",
            "--eval-iters",
            "0",
            "--device",
            suite.device,
        ),
    ]
    losses, checks = [], []
    for more in (["--attention-backend", "local"], ["--sequence-splits", "4"]):
        command = [*TORCHRUN, "--nproc-per-node=1", str(ROOT / "pretrain_gpt.py"), *flags, *more]
        problem, log = suite.process(command, deadline)
        if problem:
            checks.append({"name": f"pretrain_gpt.py {' '.join(more)}", "passed": False, "found": problem})
        losses.append([float(x) for x in re.findall(r"\blm loss: (\S+) \|", log)])
    if losses[0] and len(losses[0]) == len(losses[1]):
        worst = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
        checks.append(
            {
                "name": "pretrain_gpt.py in bf16, 4 segments: losses of Megatron's own schedule and attention",
                "passed": worst <= LOSS_TOLERANCE["bfloat16"],
                "found": f"{worst:.1e} apart over {len(losses[0])} iterations, from {losses[1][0]} to {losses[1][-1]}",
            }
        )
    return {"checks": checks, "figures": [{"own": losses[0], "segments": losses[1]}]}


SECTIONS = (
    Section(
        "attention by segments is as exact as attention of the whole, with dropout too",
        75,
        lambda suite, deadline: suite.script("attention_errors", deadline),
    ),
    Section(
        "four pipeline ranks on one GPU (over gloo, since NCCL refuses to share one) train as one rank does",
        75,
        pipeline_ranks,
    ),
    Section("pretrain_gpt.py trains on one GPU as with Megatron's own schedule", 75, training),
    Section(
        "speed of attention by segments",
        85,
        lambda suite, deadline: suite.script("attention_speed", deadline),
    ),
    Section(
        "time and memory of a stage of the 2.7b model",
        90,
        lambda suite, deadline: suite.script("stage", deadline, "--part", "time"),
    ),
    Section(
        "longest sequence that fits a stage of the 2.7b model",
        70,
        lambda suite, deadline: suite.script("stage", deadline, "--part", "room"),
    ),
)


def table(results: list[dict]) -> str:
    lines = []
    for result in results:
        lines.append(f"{result['title']} ({result['seconds']:.0f} s)")
        lines += [f"  {VERDICTS[check['passed']]:12}{check['name']}: {check['found']}" for check in result["checks"]]
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

    if args.device == "cuda" and not torch.cuda.is_available():
        print("No GPU is visible, so nothing was checked. Skipped:")
        print("\n".join(f"  skipped  {section.title}" for section in sections))
        return
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}", flush=True)
    suite, results = Suite(args.device, args.tiny), []
    for section in sections:
        limit = section.seconds * (4 if args.tiny else 1)  # a CPU that tests share
        print(f"{section.title}, at most {limit} s", flush=True)
        start = time.monotonic()
        found = section.run(suite, start + limit)
        if not found["checks"]:
            found["checks"].append({"name": section.title, "passed": False, "found": "it found nothing"})
        results.append({"title": section.title, "seconds": time.monotonic() - start, **found})
        args.output.write_text(json.dumps({"device": name, "torch": torch.__version__, "sections": results}, indent=1))
    print(f"\n{table(results)}\n\nWritten to {args.output}.")
    raise SystemExit(any(check["passed"] is False for result in results for check in result["checks"]))


if __name__ == "__main__":
    main()
