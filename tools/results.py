#!/usr/bin/env python3
"""Headline claims of the papers and what this package gains, predicted, as docs/results.md.

    python tools/results.py --output docs/results.md --pictures docs/images
    python tools/results.py --output docs/results.md --only claims

--only renews some sections and leaves the others of the file as they are. All takes half an hour of one core, nearly
all of it for the planner's searches behind `time-to-train` and `gains`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from megatron.seq1f1b.planning.planner import Plan
from megatron.seq1f1b.report.training_time import plot_training_time
from paper import headlines, layered
from paper.gains import COLUMNS, MACHINE, TOKENS, Case, cases

# Until the gains are searched again.
NOTICE = (
    "**To be redone.** The column of Megatron has no context parallelism across nodes (ring attention, or all-to-all "
    "in levels), which Megatron has and this planner does not model. On more than one node, Megatron's best can be "
    "faster than shown, and the gain over it smaller, by an unknown amount. Only the row of 8 GPUs is untouched."
)


def headline_text() -> str:
    sections = {
        "Seq1F1B trains 30B at 65536 tokens on 64 A100 without recomputation": (
            headlines.thirty_billion_at_64k,
            "arXiv 2406.03488: 1F1B and its interleaved form cannot. Predicted for the authors' code and 16 "
            "micro-batches, the verdicts agree. For Seq1F1B-I the authors measured 66.9 GiB: two chunks are near that, "
            "four, by which its published times are met, are not. [Rehearsed](rehearsal.md), too, on 8 micro-batches: "
            "1F1B exceeds 80 GiB on "
            "pipeline ranks 0 to 3, its interleaved form on 0 to 6, Seq1F1B and its interleaved form on none.",
            "bash scripts/paper/seq1f1b.sh --predict",
        ),
        "TeraPipe speeds GPT-3 175B up 5.0 times on 48 p3.16xlarge": (
            headlines.terapipe_175b,
            "arXiv 2102.07988, settings 9 and 10 of its table 1, slices of equal length here. Agrees: the measured "
            "speed-ups are 6.7, with slices of 64 to 120 tokens, and 5.0.",
            "bash scripts/paper/terapipe.sh --predict",
        ),
        "1T at 502 PFLOP/s on 3072 A100, 52 % of the peak; interleaving gains 10 % and more": (
            headlines.trillion,
            "arXiv 2104.04473, table 1; FLOPs as there, recomputation included. **That the aggregate agrees is no "
            "evidence**: two constants of its machine file, `matmul_efficiency` and `memory_efficiency`, are fitted on "
            "the rows of this table and four others. Fitted on those four alone, they predict this table 2.5 % off "
            "in the mean and 7.4 % at worst ([Published tables](paper_tables.md)). These rows have "
            "many micro-batches, and interleaving gains 4 to 6 % in them, less than the 10 % of the abstract. With few "
            "it gains more: 7B at 32768 tokens in 8 micro-batches 10 % published, 11 % predicted.",
            "bash scripts/paper/megatron_sc21.sh --predict",
        ),
    }
    lines = ["## Claims of the papers"]
    for title, (table, remark, command) in sections.items():
        lines += ["", f"### {title}", "", remark, "", f"`{command}`", "", *table()]
    return "\n".join(lines) + "\n"


def layered_text(found: Sequence[layered.Case]) -> str:
    """Our derivation of the argument of arXiv 2106.02679."""
    lines = [
        "## Layered accumulation with the modular pipeline",
        "",
        *wrap(
            "arXiv 2106.02679 claims that they halve the shortest training time, do without fast InfiniBand and use a "
            "small fraction of GPU memory. **Our own derivation**, with the costs of this package, since the tables of "
            f"the paper could not be obtained: the model {layered.MODEL} on {layered.TOKENS / 1e9:.0f} billion tokens, "
            f"sequences of {layered.LENGTH}, on A100, tensor parallelism 8, the optimizer state sharded, gradients "
            "reduced and parameters gathered beside compute, the batch by the `noise-scale` law "
            "([Time to train](planning.md#time-to-train)). *1F1B* has one chunk a rank, *interleaved 1F1B* up to 16, "
            "the *modular pipeline* is `breadth-first` with 2 to 16. Each row is the soonest of its method. *GiB of "
            "sharded state*: weights, gradients and state if data parallelism sharded the weights, too, and only the "
            "chunk at work and the next one were whole, which this package does not do.",
            118,
        ),
        "",
        *layered.markdown(found),
        "",
        *(line for each in layered.findings(found) for line in wrap(each, 118, subsequent_indent="  ")),
    ]
    return "\n".join(lines) + "\n"


def layered_picture(found: Sequence[layered.Case], path: Path) -> None:
    lines = {
        f"{method}, {network}": [
            (each.devices, each.training.days, each.training.device_hours)
            for each in found
            if (each.method, each.network) == (method, network) and each.training is not None
        ]
        for network in layered.networks()
        for method in layered.METHODS
    }
    plot_training_time(lines, f"{layered.MODEL}, {layered.TOKENS:.3g} tokens, by method and network of a node", path)


def gains_text(found: Sequence[Case]) -> str:
    lines = [
        "## What this package gains",
        "",
        *wrap(NOTICE, 118),
        "",
        *wrap(
            f"The best configuration in each column by the planner, on {MACHINE}, for {TOKENS >> 20} Mi tokens a step "
            "and the same memory of a device. *Megatron*: 1F1B and its interleaved form on whole sequences, with "
            "context parallelism and recomputation. *Published*: also ZB-H1, and Seq1F1B with its own partition. The "
            f"command of a row is `seq1f1b plan --machine {MACHINE} --model MODEL --gpus GPUS --seq-length TOKENS "
            "--global-batch-size BATCH`, which has more choices: other micro-batches, numbers of segments and ways to "
            "cut. Context parallelism is by heads and within a node, with segments in the last two columns; replicas "
            "exchange beside compute.",
            118,
        ),
        "",
        "| model | GPUs | tokens | batch | Megatron | published | this package | over Megatron | over published |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in found:
        cells = [_cell(case.best[name]) for name in COLUMNS]
        shares = [_share(case.gain(name), case.best["this package"]) for name in ("Megatron", "published")]
        sizes = map(str, (case.model, case.gpus, case.length, case.batch))
        lines.append(f"| {' | '.join([*sizes, *cells, *shares])} |")
    lines += [
        "",
        *wrap(
            "In the cells: tokens/s of all GPUs, GiB of the fullest, tensor x context x pipeline size, k segments, C "
            "chunks. Where sequences are short or GPUs few, the pipeline hardly idles and there is nothing to gain: "
            "Megatron's own schedules are as fast, and differences below 3 % are within the error of prediction.",
            118,
        ),
    ]
    return "\n".join(lines) + "\n"


def _cell(plan: Plan | None) -> str:
    if plan is None:
        return "does not fit"
    setup = plan.prediction.setup
    sizes = f"{setup.tensor_parallel}x{setup.context_parallel}x{setup.pipeline_parallel}"
    words = [f"{plan.prediction.tokens_per_second:.0f}, {plan.memory_gib:.0f} GiB, {sizes}"]
    words += [f"k {len(setup.segments)}"] * (len(setup.segments) > 1)
    words += [f"C {setup.placement.num_chunks}"] * (setup.placement.num_chunks > 1)
    words += [setup.family] * (setup.family != "1f1b") + ["recompute"] * (setup.recompute == "full")
    return ", ".join(words)


def _share(gain: float | None, ours: Plan | None) -> str:
    if gain is None:
        return "-" if ours is None else "only this fits"
    return f"{100 * gain:+.1f} %" if gain > 0.0005 else "none"


def picture(found: Sequence[Case], path: Path) -> None:
    """Throughput of each column over that of Megatron, or of the first that fits."""
    from matplotlib.figure import Figure

    fitting = [case for case in found if case.best["this package"] is not None]
    figure = Figure(figsize=(8, 0.45 * len(fitting) + 1.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, colour) in enumerate(zip(COLUMNS, ("#b0b7c0", "#7da7d9", "#e07b39"), strict=True)):
        ours = [case.best["this package"] for case in fitting]
        plans = [case.best[name] for case in fitting]
        shares = [
            0.0 if plan is None or best is None else 100 * best.prediction.seconds / plan.prediction.seconds
            for plan, best in zip(plans, ours, strict=True)
        ]
        axes.barh([row + 0.26 * (number - 1) for row in range(len(fitting))], shares, 0.24, color=colour, label=name)
        for row, share in enumerate(shares):
            if not share:
                axes.text(1, row + 0.26 * (number - 1), "does not fit", va="center", fontsize=6)
    names = [f"{case.model}, {case.gpus} GPUs, {case.length >> 10}k" for case in fitting]
    axes.set_yticks(range(len(fitting)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("throughput, % of that of this package")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.06), ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


HEAD = """\
# Results

Written by `python tools/results.py --output docs/results.md`. All times are predicted; how far predictions are off is
shown in [Published tables](paper_tables.md).

"""


def claims_section(pictures: Path | None) -> str:
    return headline_text()


def layered_section(pictures: Path | None) -> str:
    found = list(layered.cases(progress))
    text = layered_text(found)
    if pictures is not None:
        layered_picture(found, pictures / "layered.png")
        text += "\n![Days and GPU hours by method](images/layered.png)\n"
    return text


def gains_section(pictures: Path | None) -> str:
    found = list(cases(progress))
    text = gains_text(found)
    if pictures is not None:
        picture(found, pictures / "results.png")
        text += "\n![Throughput by schedules](images/results.png)\n"
    return text


# Name -> what writes the section; the order is that of the page.
SECTIONS = {"claims": claims_section, "layered": layered_section, "gains": gains_section}


def progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def sections_of(page: str) -> list[str]:
    """The parts of a page from one heading of the second level to the next."""
    return [f"## {part.rstrip()}\n" for part in f"\n{page}".split("\n## ")[1:]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Markdown to write")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where to draw pictures (needs matplotlib)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    args = parser.parse_args(argv)
    written = sections_of(args.output.read_text(encoding="utf-8")) if set(args.only) < set(SECTIONS) else []
    if written and len(written) != len(SECTIONS):
        parser.error(f"{args.output} has {len(written)} sections, not {len(SECTIONS)}; write all of them")
    for number, (name, section) in enumerate(SECTIONS.items()):
        if name in args.only:
            written[number : number + 1] = [section(args.pictures)]
    args.output.write_text(HEAD + "\n".join(written), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
