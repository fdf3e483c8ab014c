#!/usr/bin/env python3
"""Headline claims of the papers, predicted, as docs/results.md.

    python tools/results.py --output docs/results.md --pictures docs/images
    python tools/results.py --output docs/results.md --only claims

--only renews some sections and leaves the others of the file as they are. All takes minutes of one core,
nearly all of them for the searches behind `layered`.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import wrap

from megatron.seq1f1b.commands.gain_cells import Cell, read_cells
from megatron.seq1f1b.commands.gain_map import gain_of, plot_gains
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.planner.gain import Gain
from paper import headlines, layered
from paper.training_time import plot_training_time

# The columns by which gains are sorted, and in whose order they are shown.
_BY = ("seq_length", "gpus", "batch", "bandwidth")
# GB/s each way between a device and its host if no other device slows the link down.
_FASTER_HOST = {"h100-80gb": 50.0, "h20-96gb": 50.0, "l40s-48gb": 30.0, "a100-80gb": 25.0}
# Model, machine and length of the cells of the picture.
_PICTURED = ("llama3-70b", "h100-80gb", 131072)
# Published runs of models with recurrent layers.
_RECURRENT = ("qwen3-next", "nemotron-3")
GAINS = Path(__file__).parents[1] / "docs" / "gains.csv"
PUBLISHED = GAINS.with_name("paper_tables.csv")


def published_rows() -> list[dict[str, str]]:
    """The rows of the published tables that have an error."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["error"]]


def nearest(*tables: str) -> str:
    """How far predictions are off in published tables that are nearest to a predicted one."""
    rows = published_rows()
    found = []
    for table in tables:
        errors = [abs(float(row["error"])) for row in rows if row["table"] == table]
        off = f"{100 * fmean(errors):.1f} % off in the mean and {100 * max(errors):.1f} % at worst"
        found.append(f"{table} ({len(errors)} rows), {off}")
    return f"Nearest [published rows](paper_tables.md): {'; '.join(found)}."


def headline_text() -> str:
    sections = {
        "Seq1F1B trains 30B at 65536 tokens on 64 A100 without recomputation": (
            headlines.thirty_billion_at_64k,
            "arXiv 2406.03488: 1F1B and its interleaved form cannot. Predicted for the authors' code and 16 "
            "micro-batches, the verdicts agree. The authors measured 66.9 GiB for Seq1F1B-I: the prediction for two "
            "chunks is near that, the one for four, which meets the published times, is not. A "
            "[rehearsal](rehearsal.md) on 8 micro-batches agrees, too: 1F1B exceeds 80 GiB on pipeline ranks 0 to 2, "
            "its interleaved form on 0 to 5, Seq1F1B and its interleaved form on none.",
            "bash scripts/paper/seq1f1b.sh --predict",
            ("Seq1F1B memory", "Seq1F1B 7B throughput"),
        ),
        "TeraPipe speeds GPT-3 175B up 5.0 times on 48 p3.16xlarge": (
            headlines.terapipe_175b,
            "arXiv 2102.07988, settings 9 and 10 of its table 1; slices have equal lengths here. The predictions "
            "agree: the measured speed-ups are 6.7, with slices of 64 to 120 tokens, and 5.0.",
            "bash scripts/paper/terapipe.sh --predict",
            ("TeraPipe latencies", "TeraPipe, gain of slices"),
        ),
        "1T at 502 PFLOP/s on 3072 A100, 52 % of the peak; interleaving gains 10 % and more": (
            headlines.trillion,
            "arXiv 2104.04473, table 1; FLOPs are counted as there, with recomputation. **The agreement of the "
            "aggregate is no evidence**: two constants of the machine file, `matmul_efficiency` and "
            "`memory_efficiency`, are fitted on the rows of this table and four others. Fitted on those four alone, "
            "they predict this table 2.5 % off in the mean and 7.4 % at worst ([Published tables](paper_tables.md)). "
            "These rows have many micro-batches, so interleaving gains only 4 to 6 %, less than the 10 % of the "
            "abstract. It gains more with few: for 7B at 32768 tokens in 8 micro-batches, 10 % were published and "
            "11 % are predicted.",
            "bash scripts/paper/megatron_sc21.sh --predict",
            ("Megatron SC21 table 1",),
        ),
    }
    lines = ["## Claims of the papers"]
    for title, (table, remark, command, near) in sections.items():
        lines += ["", f"### {title}", "", remark, "", f"`{command}`", "", *table(), "", nearest(*near)]
    return "\n".join(lines) + "\n"


# What of arXiv 2106.02679 the table shows, and what it does not.
CLAIMS = (
    "- *A small fraction of memory* holds for the state of the soonest trainings: on 65536 GPUs with InfiniBand, the "
    "partitioned state takes 12 GiB and that of the other methods 23 to 45. It does not hold for the whole device: "
    "`breadth-first` keeps the activations of all micro-batches, which take more than that even with recomputation.",
    "- *Half the time of 1F1B* does not hold. With the state partitioned, fewer and fuller pipeline ranks fit, which "
    "gives the shortest training on InfiniBand. It is a tenth shorter than with interleaved 1F1B, which shrinks the "
    "bubble, too.",
    "- *No fast InfiniBand* holds for replicas with many micro-batches: on 16384 GPUs the modular pipeline needs 10 "
    "GB/s a node and 1F1B 56. It does not hold for the shortest training: 1024 replicas of 12 micro-batches have "
    "little compute to hide two gathers and a reduction behind, and on the slow network the partition gains nothing.",
)


def layered_text(found: Sequence[layered.Case]) -> str:
    """Our derivation of the argument of arXiv 2106.02679."""
    lines = [
        "## Layered accumulation with the modular pipeline",
        "",
        *wrap(
            "arXiv 2106.02679 claims that they halve the shortest training time, do without fast InfiniBand and use a "
            "small fraction of GPU memory. The tables of the paper could not be obtained, so this is **our own "
            f"derivation** with the costs of this package: {layered.MODEL} on {layered.TOKENS / 1e9:.0f} billion "
            f"tokens, sequences of {layered.LENGTH}, on A100, with tensor parallelism 8, a sharded optimizer state, "
            "gradients reduced and parameters gathered beside compute, and the batch of the `noise-scale` law "
            "([Time to train](planning.md#time-to-train)). *1F1B* has one chunk a rank, *interleaved 1F1B* up to 16, "
            "the *modular pipeline* is `breadth-first` with 2 to 16, its *state partitioned* by `--partition-state`. "
            "Each row is the soonest training of its method. *Of state*: weights, gradients and state of the "
            "optimizer. *10 % longer below*: the bandwidth of a node below which the step takes 10 % longer than on "
            "8 x 200 Gbit/s.",
            118,
        ),
        "",
        *layered.markdown(found),
        "",
        *wrap(nearest("Megatron SC21 table 1", "vTrain multi-node") + " None has a partitioned state.", 118),
        "",
        *(
            line
            for finding in (*layered.findings(found), *CLAIMS)
            for line in wrap(finding, 118, subsequent_indent="  ")
        ),
    ]
    return "\n".join(lines) + "\n"


def layered_picture(found: Sequence[layered.Case], path: Path) -> None:
    lines = {
        f"{method}, {network}": [
            (case.devices, case.soonest.days, 24 * case.soonest.days * case.devices)
            for case in found
            if (case.method, case.network) == (method, network) and case.soonest is not None
        ]
        for network in layered.networks()
        for method in layered.METHODS
    }
    plot_training_time(lines, f"{layered.MODEL}, {layered.TOKENS:.3g} tokens, by method and network of a node", path)


HEAD = """\
# Results

Written by `python tools/results.py --output docs/results.md`. All times are predicted; how far predictions are off is
shown in [Published tables](paper_tables.md). [Measured](measured.md) is the page of what has run on a GPU.

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


def reason(cell: Cell, without_host: Cell | None) -> str:
    """What makes the gain of a cell, by the same cell with nothing on the host; "" within the error."""
    gain = gain_of(cell)
    if not gain.is_of_segments:
        return ""
    if gain.value is None:
        return "less memory"
    if without_host is not None and not gain_of(without_host).is_of_segments:
        return "host memory"
    if (
        None not in (cell.bubble_ratio, cell.megatron_bubble_ratio)
        and 2 * (cell.megatron_bubble_ratio - cell.bubble_ratio) > gain.value
    ):
        return "smaller bubble"
    return "less memory"


def gain_rows(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """A row for each question, with the configurations at the link of the machine file and the gain at each link."""
    by_link: dict[tuple[object, ...], dict[float, Cell]] = defaultdict(dict)
    for cell in sorted(cells, key=lambda cell: (cell.model, cell.machine, *(getattr(cell, name) for name in _BY))):
        place = (cell.model, cell.machine, *(getattr(cell, name) for name in _BY))
        by_link[place][cell.host_bandwidth] = cell
    for found in by_link.values():
        machine = next(iter(found.values())).machine
        links = read_machine(machine).device.host_bandwidth / 1e9, _FASTER_HOST[machine], 0.0
        shown = next(found[link] for link in links if link in found)
        words = shown.named_words()
        gains = [_gain_word(gain_of(found[link])) if link in found else "" for link in links]
        device = words["machine"].partition("-")[0]
        yield [
            f"{words['model']}<br>{words['gpus']} {device}",
            f"{words['batch']} × {shown.seq_length // 1024}k<br>{words['bandwidth']} GB/s",
            _step_word(words["seconds"], words["configuration"]),
            _step_word(words["megatron_seconds"], words["megatron_configuration"]),
            *gains,
            reason(shown, found.get(0.0)),
        ]


def _step_word(seconds: str, configuration: str) -> str:
    """The time of a step, and below it how it is run."""
    return f"{seconds} s<br>{configuration}" if seconds else configuration


def _gain_word(gain: Gain) -> str:
    """A gain, in brackets within the error."""
    return f"({gain.percent})" if gain.is_within_error else gain.percent


ABOUT_GAINS = """\
## What this package gains

Each row compares the fastest step that the planner finds for this package with the fastest one of Megatron's own
schedules, which get [all that saves memory or hides communication in
Megatron](planning.md#what-megatron-alone-is-credited-with). Either side may move activations to the host. Where the
gain is within the error, or negative, [take Megatron's own
schedules](choosing.md#segments-or-megatrons-own-schedules).

- *sequences*: their number in a step × their tokens in 1024, and GB/s of a node's network.
- *ours*, *Megatron's*: the time of a step, and T tensor parallelism, X context parallelism, P pipeline parallelism, C
  model chunks, k segments.
- *ours*, *Megatron's* and *gain* are at the rate to the host that all devices of a node reach at once: 30 GB/s each way
  on H100 and H20, 20 on L40S, 12 on A100.
- *faster host*: the gain at 50 GB/s (L40S: 30, A100: 25), as if no other device of the node copied.
- Gains in brackets are within the error.
- *no host*: the gain if neither side moves anything there.
- *made by*: *host memory* if the gain without a host is within the error; a *smaller bubble* if that is more than half
  of the gain; else *less memory*, since segments then allow other parallel sizes or less recomputation.
"""


def gains_section(pictures: Path | None) -> str:
    """Of the cells that `seq1f1b gain-map --output docs/gains.csv` found."""
    cells = read_cells(GAINS)
    error = nearest(
        "NVIDIA long sequences",
        "Kwai with offload",
        "NVIDIA performance summary",
        "NVIDIA performance summary, mixtures of experts",
        "Other mixtures of experts",
        "Llama 3 405B",
    )
    recurrent = [row for row in published_rows() if row["run"].startswith(_RECURRENT)]
    off = 100 * fmean(abs(float(row["error"])) for row in recurrent)
    error += f" {len(recurrent)} of these rows have recurrent layers, and are {off:.0f} % off in the mean; none has "
    error += "context parallelism on A100: there the error is not known."
    lines = [ABOUT_GAINS, *wrap(error, 118, break_on_hyphens=False), ""]
    lines += ["`seq1f1b gain-map --output docs/gains.csv --host-bandwidths 30 50 0 --model ...`", ""]
    head = ["model", "sequences", "ours", "Megatron's", "gain", "faster host", "no host", "made by"]
    lines += [f"| {' | '.join(head)} |", len(head) * "|---" + "|"]
    lines += [f"| {' | '.join(row)} |" for row in gain_rows(cells)]
    lines += ["", "![The gain by network and GPUs: 70B, 128k tokens](images/gains.png)"]
    if pictures is not None:
        shown = [cell for cell in cells if (cell.model, cell.machine, cell.seq_length) == _PICTURED]
        plot_gains(shown, "gain of segments, 70B, 131072 tokens, H100", pictures / "gains.png")
    return "\n".join(lines) + "\n"


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
