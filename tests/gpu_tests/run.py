"""The checks that need a GPU, and the figures that a page is made of: run by scripts/gpu_test.sh.

Sections run in the order of their worth and share one budget of seconds: time that one leaves is there for all later
ones, and a slow start takes from the last ones. Those that check losses and gradients run side by side as far as cores
are free, those that measure speed alone. Prints checks and figures of each section as a table, and writes all of them
to one JSON and one page after each. Without a GPU it names the sections, skips them, and succeeds.
With `--device cpu --tiny` all of its code runs on a CPU at sizes that measure nothing.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import groupby
from pathlib import Path

from gpu_tests import pipelines, training
from gpu_tests.suite import NOT_RUN, Cores, Found, Suite, is_installed, verdict

# Compiles its kernels when they are first called, for which the suite has so many seconds more.
COMPILES, COMPILING = "flash_attn.cute", 300
SECONDS = 560  # less than ten minutes, with what is left for the start of the suite itself


@dataclass(frozen=True)
class Section:
    """What `run` checks in about so many seconds. It has the machine for itself unless it is `beside` others."""

    title: str
    seconds: int
    run: Callable[[Suite], Found]
    beside: bool = False
    gpus: int = 1
    module: str = "torch"
    warms_up: bool = False  # loads what others load, so it may take as long as it needs

    def lacks(self, gpus: int) -> str | None:
        """What this machine would need to run it."""
        if gpus < self.gpus:
            return f"{self.gpus} GPUs"
        return None if is_installed(self.module) else self.module


def program(name: str, *flags: str) -> Callable[[Suite], Found]:
    return lambda suite: suite.program(name, *flags)


def sections_for(gpus: int) -> tuple[Section, ...]:
    return (
        Section("versions, and what the device can do at most", 40, program("start"), warms_up=True),
        Section(
            "attention by segments is as exact as that of the whole, with dropout, windows and sinks",
            35,
            program("attention_errors"),
            beside=True,
        ),
        Section("four pipeline ranks on one GPU train as one does, over gloo", 60, pipelines.over_gloo, beside=True),
        Section("pretrain_gpt.py trains on one GPU as with Megatron's own schedule", 40, training.local, beside=True),
        Section("long and short sequences in units train as each alone does", 25, pipelines.units, beside=True),
        Section(
            "Transformer Engine's layers train by segments as with Megatron's own schedule",
            40,
            training.transformer_engine,
            beside=True,
            module=training.TE,
        ),
        Section(
            "two and four ranks over NCCL train as one does, with one hardware queue and with many",
            90,
            partial(pipelines.over_nccl, gpus=gpus),
        ),
        Section("eight GPUs train as one does: TP 2, PP 4, overlap", 180, training.on_eight, gpus=8),
        Section("speed of attention by segments", 70, program("attention_speed")),
        Section(
            "a stage of the 2.7b model: time, memory, host, offload, loss, longest sequence, experts",
            160,
            program("stage_parts"),
        ),
        Section(
            "two ranks that share experts: a forward beside a backward hides their exchange",
            40,
            partial(pipelines.pairs, gpus=gpus),
        ),
    )


@dataclass
class Budget:
    """Seconds that the sections share, until `end` of the monotonic clock. What sections plan is for a GPU: on a CPU
    (not `is_auto`) nothing but the end limits them."""

    end: float
    is_auto: bool = True

    def until(self, sections: Sequence[Section], later: Sequence[Section]) -> float:
        """When the time of `sections`, which run side by side, is over: they have what they plan and what nobody plans.
        Where less is left than all plan, it is `later` ones that go short."""
        if not self.is_auto or any(section.warms_up for section in sections):
            return self.end
        left = max(0.0, self.end - time.monotonic())
        planned = sum(section.seconds for section in sections)
        spare = left - planned - sum(section.seconds for section in later)
        return time.monotonic() + min(left, planned + max(0.0, spare))


def page_of(result: dict) -> str:
    """Checks and figures of a section in Markdown."""
    lines = [f"## {result['title']} ({result['seconds']:.0f} s)", "", "| | check | found |", "|---|---|---|"]
    lines += [f"| {verdict(check)} | {check['name']} | {check['found']} |" for check in result["checks"]]
    figures = [json.dumps(figure) for figure in result["figures"]]
    lines += ["", "<details><summary>figures</summary>", "", "```", *figures, "```", "", "</details>", ""]
    return "\n".join(lines)


def result_of(section: Section, suite: Suite, gpus: int) -> dict:
    """The section run, or why not."""
    start = time.monotonic()
    found = Found()
    if lacks := section.lacks(gpus):
        found.check(section.title, None, f"{NOT_RUN}needs {lacks}")
    else:
        print(f"{section.title}, at most {max(0.0, suite.until - start):.0f} s", flush=True)
        try:
            found = section.run(suite)
        except Exception as error:  # the sections after it run
            first_line, *_ = str(error).splitlines() or [""]
            found.check(section.title, False, f"{type(error).__name__}: {first_line}")
    if not found.checks:
        found.check(section.title, False, "it found nothing")
    took = time.monotonic() - start
    return {"title": section.title, "seconds": took, "checks": found.checks, "figures": found.figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which show only that the code runs")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="sections to run, counted from 1")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that all sections share; default: %(default)s")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("gpu_test.json"),
        help="default: gpu_test.json; a folder of that name without the ending has the log of every process",
    )
    args = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    sections = [section for number, section in enumerate(sections_for(gpus), 1) if not args.only or number in args.only]
    if not gpus:
        print("No GPU is visible, so nothing was checked. Skipped:")
        print("\n".join(f"  skipped  {section.title}" for section in sections))
        return
    name = f"{gpus} x {torch.cuda.get_device_name()}" if args.device == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}", flush=True)
    results = run(sections, args, gpus, {"date": date.today().isoformat(), "device": name, "tiny": args.tiny})
    verdicts = Counter(verdict(check) for result in results for check in result["checks"])
    print(", ".join(f"{number} {each}" for each, number in verdicts.items()))
    print(f"Written to {args.output}, and for an issue to {args.output.with_suffix('.md')}.")
    raise SystemExit(verdicts["FAILED"] > 0)


def run(sections: list[Section], args: argparse.Namespace, gpus: int, head: dict) -> list[dict]:
    """The results of all sections, written to files after each."""
    folder = args.output.with_suffix("").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    compiling = COMPILING if args.device == "cuda" and is_installed(COMPILES) else 0
    budget = Budget(time.monotonic() + args.seconds + compiling, is_auto=not args.tiny)
    cores = Cores(os.cpu_count() or 1)
    results: list[dict] = []
    later = list(sections)
    for _, group in groupby(sections, key=lambda section: section.beside or section):
        together = list(group)
        later = later[len(together) :]
        can_run = [section for section in together if section.lacks(gpus) is None]
        can_run_later = [section for section in later if section.lacks(gpus) is None]
        suite = Suite(args.device, args.tiny, folder, cores, until=budget.until(can_run, can_run_later))
        found = suite.beside(*(partial(result_of, section, suite, gpus) for section in together))
        results += found
        args.output.write_text(json.dumps({**head, "sections": results}, indent=1))
        pages = [page_of(result) for result in found]
        print("\n".join(pages), flush=True)
        page = args.output.with_suffix(".md")
        title = f"# {head['device']}, {head['date']}\n\n"
        page.write_text(title + "\n".join(page_of(result) for result in results))
    return results


if __name__ == "__main__":
    main()
