#!/usr/bin/env python3
"""What bash scripts/gpu_test.sh has measured on a GPU, as docs/measured.md.

    python tools/measured.py gpu_test.json
    python tools/measured.py first.json second.json   # with sections that were run again (--only), or in another call

    python tools/measured.py --name measured-h200 gpu_test.json    # a page of its own for another kind of GPU

keeps what it read as docs/measured.json, and draws docs/images/measured.svg (which needs matplotlib). Without a file it
writes the page anew from docs/measured.json; where there is none, the page says that nothing has been measured.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from megatron.seq1f1b.files.typed import read_json
from megatron.seq1f1b.report.style import picture

DOCS = Path(__file__).parents[1] / "docs"

Figure = Mapping[str, Any]

HEAD = "\nWritten by `python tools/measured.py gpu_test.json`, of what [`bash scripts/gpu_test.sh`]"
HEAD += "(first-gpu.md) found on one GPU.\n"
NOTHING_YET = f"""\
# Measured
{HEAD}
There is no measurement yet: no GPU was at hand. All figures of GPUs in these pages are predicted; [Results](results.md)
and [Published tables](paper_tables.md) show how, and how far predictions are off. Ten minutes on one GPU fill this page
with time and memory of a stage over the number of segments, the speed of attention, the longest sequences, what the
host needs, and the errors of the planner. [Your first GPUs](first-gpu.md) shows how, also without a network.
"""


class Check(Struct):
    name: str
    passed: bool | None
    found: str


class Section(Struct):
    title: str
    checks: list[Check]
    figures: list[dict[str, int | float | bool | str | list[float] | None]]


class Result(Struct):
    """What scripts/gpu_test.sh writes."""

    date: str
    device: str
    tiny: bool
    sections: list[Section]


@dataclass(frozen=True)
class Column:
    """A column of a table, with sentences that explain it."""

    title: str
    value: Callable[[Figure], str]
    note: str = ""


def number(name: str, digits: str, factor: float = 1.0) -> Callable[[Figure], str]:
    """The figure `name` in this format; empty where there is none."""

    def text(figure: Figure) -> str:
        value = figure.get(name)
        return "" if value is None else format(factor * value, digits)

    return text


def words(name: str) -> Callable[[Figure], str]:
    def text(figure: Figure) -> str:
        value = figure.get(name)
        return "" if value is None else str(value)

    return text


def of_step(name: str, step: int) -> Callable[[Figure], str]:
    """One of a figure's numbers of all steps; empty where the run did not come to it."""
    return lambda figure: f"{figure[name][step]:.4f}" if figure[name] else ""


def off(measured: str, predicted: str) -> Callable[[Figure], str]:
    """How far a prediction is off, in percent."""
    return lambda figure: f"{100 * (figure[predicted] / figure[measured] - 1):+.0f} %"


def or_out_of_memory(value: Callable[[Figure], str]) -> Callable[[Figure], str]:
    return lambda figure: "out of memory" if figure.get("out_of_memory") else value(figure)


@dataclass(frozen=True)
class Table:
    """A section of the page: the figures of the table `name` of gpu_test.json."""

    title: str
    name: str
    text: str
    columns: tuple[Column, ...]
    picture: str = ""


TOKENS = Column("tokens", number("length", ",.0f"))
SEGMENTS = Column("segments", words("segments"))
SECONDS = Column("s a sequence", or_out_of_memory(number("seconds_per_sequence", ".3f")))

TABLES = (
    Table(
        "A stage over the number of segments",
        "stage",
        "The first of 8 stages of the 2.7b model (4 layers, hidden size 2560, 32 heads), in the order of its "
        "pipeline rank under Seq1F1B, alone: it computes and keeps what a rank of the pipeline does, and never waits. "
        "Memory is above weights and the state of the optimizer.",
        (
            TOKENS,
            SEGMENTS,
            SECONDS,
            Column(
                "host",
                number("issued_share", ".0%"),
                "*Host*: the share of that time after which the host has issued all. It can be ahead by about a "
                "thousand kernels; at 100 % the GPU waits for it.",
            ),
            Column("tokens/s", number("tokens_per_second", ",.0f")),
            Column("GiB", number("peak_gib", ".2f")),
            Column("GiB with what the allocator holds", number("reserved_gib", ".1f")),
        ),
        "Time and memory of a stage over the number of segments",
    ),
    Table(
        "Beside the prediction",
        "prediction",
        "The same steps by the costs of `seq1f1b plan`: seconds in compute, and what the planner counts beside "
        "weights, gradients, the state of the optimizer and what the allocator holds back. Its constants are those of "
        "Transformer Engine's layers and attention; the stage here has Megatron's local layers, and the attention that "
        "the table of versions names.",
        (
            TOKENS,
            SEGMENTS,
            SECONDS,
            Column("predicted", number("predicted_seconds", ".3f")),
            Column("off", off("seconds_per_sequence", "predicted_seconds")),
            Column("GiB", number("peak_gib", ".2f")),
            Column("predicted GiB", number("predicted_gib", ".2f")),
            Column("GiB off", off("peak_gib", "predicted_gib")),
            Column("constants of", words("machine")),
        ),
    ),
    Table(
        "The longest sequence",
        "longest",
        "That fits the same stage on this card, in steps of 4,096 tokens.",
        (SEGMENTS, Column("tokens", number("longest_sequence", ",.0f"))),
    ),
    Table(
        "Attention",
        "attention speed",
        "Causal attention, one sequence, bf16, forward and backward; cuDNN's runs on the whole sequence, with expanded "
        "keys and values.",
        (
            TOKENS,
            Column("heads", words("heads")),
            Column("kernel", words("kernel")),
            SEGMENTS,
            Column("TFLOPS forward", number("forward_tflops", ".0f")),
            Column("backward", number("backward_tflops", ".0f")),
            Column("both", number("tflops", ".0f")),
            Column(
                "of own whole",
                number("of_own_whole", ".2f"),
                "*Of own whole*: the speed beside that of the same kernel on the whole sequence.",
            ),
        ),
    ),
    Table(
        "The loss in pieces",
        "loss",
        "The projection to the vocabulary and the loss of one sequence; all its segments go forward before one goes "
        "backward.",
        (
            Column("tokens", number("tokens", ",.0f")),
            Column("hidden size", words("hidden")),
            Column("vocabulary", number("vocabulary", ",.0f")),
            SEGMENTS,
            Column("loss", words("loss")),
            Column("s", or_out_of_memory(number("seconds", ".3f"))),
            Column("GiB", number("peak_gib", ".2f")),
        ),
    ),
    Table(
        "Activations on the host",
        "offload",
        "The stage above with a share of its activations in the memory of the host: whole units, or layer by layer "
        "where a number of layers may leave at once.",
        (
            TOKENS,
            SEGMENTS,
            Column("share", number("share", "g")),
            Column("layers leaving", number("layers_leaving", "d")),
            SECONDS,
            Column("GiB", number("peak_gib", ".2f")),
            Column("GiB on the host", number("host_gib", ".2f")),
            Column("GiB moved a step", number("moved_gib", ".2f")),
            Column("link, GB/s each way", number("link_gb_per_s", ".0f")),
            Column(
                "hidden",
                number("hidden_share", ".0%"),
                "*Hidden*: the part of the copies that runs beside compute.",
            ),
        ),
    ),
    Table(
        "What the host needs",
        "host",
        "Microseconds a layer and unit to issue a forward and a backward, and until the GPU has computed them, at the "
        "shapes of a rank of this tensor parallelism. Where both are equal, the GPU waits for the host, and shorter "
        "segments gain nothing.",
        (
            Column("tokens of a segment", number("tokens", ",.0f")),
            Column("TP", words("tensor_parallel")),
            Column("host", number("host_us_per_layer_and_unit", ".0f")),
            Column(
                "Megatron's own",
                number("own_us_per_layer_and_unit", ".0f"),
                "*Megatron's own*: what the host needs for Megatron's layers and as many tokens, in sequences of their "
                "own.",
            ),
            Column("until computed", number("all_us_per_layer_and_unit", ".0f")),
        ),
    ),
    Table(
        "A stage with experts",
        "experts",
        "Eight experts, two for each token; their dispatcher makes the host wait in each layer and segment.",
        (
            TOKENS,
            SEGMENTS,
            SECONDS,
            Column(
                "s as short sequences",
                number("seconds_as_sequences", ".3f"),
                "*As short sequences*: the same tokens as whole sequences of a segment's length, which shows what "
                "short calls cost without any segments.",
            ),
        ),
    ),
    Table(
        "Forwards beside backwards",
        "pairs",
        "A step of a small model whose experts are shared by two ranks, by the events of its actions on the slower "
        "one. Ranks that share a GPU also share its time.",
        (
            TOKENS,
            SEGMENTS,
            Column("s", number("seconds_alone", ".4f")),
            Column("s with pairs", number("seconds_with_pairs", ".4f")),
            Column("s without an exchange", number("seconds_without_exchange", ".4f")),
            Column(
                "hidden",
                number("hidden_share", ".0%"),
                "*Hidden*: the part of the exchange that `--overlap-moe-expert-parallel-comm` takes off the step.",
            ),
        ),
    ),
    Table(
        "Training",
        "training",
        "`pretrain_gpt.py` in bf16 on a small model: losses of the first and the last iteration, and the norm of all "
        "gradients in the first. Runs share the GPU, so that tokens/s only show that they are under way.",
        (
            Column("on", words("on")),
            Column("run", words("run")),
            Column("tokens", number("tokens", ",.0f")),
            Column("first loss", of_step("losses", 0)),
            Column("last loss", of_step("losses", -1)),
            Column("norm", of_step("norms", 0)),
            Column("tokens/s", number("tokens_per_second", ",.0f")),
        ),
    ),
    Table(
        "Several ranks over NCCL",
        "nccl",
        "The settings of NCCL that were tried for ranks that share one GPU, in this order, until some work.",
        (
            Column("settings", words("settings")),
            Column("work", lambda figure: "yes" if figure["works"] else "no"),
            Column("found", words("found")),
        ),
    ),
    Table(
        "Steps of several ranks",
        "pipelines",
        "Median seconds of a step of a small model, and memory above that between steps, on the rank with the most. "
        "Ranks that share a GPU take turns: a proof of order, not of speed.",
        (
            Column("ranks", words("run")),
            Column("schedule", words("variant")),
            Column("s in fp32", number("float32_seconds", ".2f")),
            Column("s in bf16", number("bfloat16_seconds", ".2f")),
            Column("GiB in bf16", number("bfloat16_peak", ".2f", 2**-30)),
        ),
    ),
    Table(
        "Errors of attention",
        "attention errors",
        "Against fp64, relative, root mean square; the worst of output and gradients.",
        (
            Column("kernel", words("package")),
            Column("case", words("case")),
            Column("whole", number("whole", ".1e")),
            Column("segments", number("segments", ".1e")),
        ),
    ),
)


def figures_of(result: Mapping[str, Any], table: str) -> list[Figure]:
    return [figure for section in result["sections"] for figure in section["figures"] if figure["table"] == table]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table; a bar would end a cell, and a brace at its end names attributes for the site."""
    for row in (head, ["---"] * len(head), *rows):
        cells = [cell.replace("|", "/").replace("{", r"\{") for cell in row]
        yield f"| {' | '.join(cells)} |"


def page_of(result: Mapping[str, Any] | None, name: str = "measured") -> str:
    """The page of a name, from the content of gpu_test.json or without one."""
    if result is None:
        return NOTHING_YET
    title = "Measured" if name == "measured" else f"Measured on {result['device']}"
    lines = [f"# {title}", HEAD]
    lines.append(f"Measured on {result['date']}, on {result['device']}.")
    lines += ["", *summary(result), ""]
    for table in TABLES:
        figures = figures_of(result, table.name)
        # Earlier suites measured less.
        columns = [column for column in table.columns if any(column.value(figure) for figure in figures)]
        if not columns:
            continue
        notes = [column.note for column in columns if column.note]
        lines += [f"## {table.title}", "", " ".join([table.text, *notes]), ""]
        if table.picture and drawn(result):
            lines += [f"![{table.picture}](images/{name}.svg)", ""]
        rows = [[column.value(figure) for column in columns] for figure in figures]
        lines += [*markdown([column.title for column in columns], rows), ""]
    lines += ["## All checks", "", *checks(result), ""]
    return "\n".join(lines)


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """Versions, what the device can do at most, and how many checks passed."""
    for versions in figures_of(result, "versions"):
        rows = [[name, str(value)] for name, value in versions.items() if name != "table"]
        yield from markdown(["what", "version"], rows)
        yield ""
    for found in figures_of(result, "ceilings"):
        product = found["product_tflops"]
        copy = found["copy_gb_per_s"]
        link = found["link_gb_per_s"]
        yield f"A product of large matrices reaches {product:.0f} TFLOPS in bf16, a copy on the card {copy:,.0f} GB/s"
        yield f"(read and written), the link to the host {link:.0f} GB/s each way while both are in use."
        yield ""
    verdicts = Counter(verdict(check) for section in result["sections"] for check in section["checks"])
    yield f"Checks: {', '.join(f'{count} {outcome}' for outcome, count in verdicts.items())}."


def verdict(check: Mapping[str, Any]) -> str:
    if check["found"].startswith("not run: "):
        return "not run"
    return {None: "not judged", True: "ok", False: "FAILED"}[check["passed"]]


def checks(result: Mapping[str, Any]) -> Iterator[str]:
    """A table of all checks, those that failed first."""
    found = [check for section in result["sections"] for check in section["checks"]]
    found.sort(key=lambda check: check["passed"] is not False)
    yield from markdown(["", "check", "found"], [[verdict(check), check["name"], check["found"]] for check in found])


def drawn(result: Mapping[str, Any]) -> list[Figure]:
    """What the picture shows; nothing if the time did not suffice for a stage."""
    return [figure for figure in figures_of(result, "stage") if not figure.get("out_of_memory")]


def plot(figures: Sequence[Figure], path: Path) -> None:
    """Time and memory of a stage over the number of segments, a line for each length."""
    lengths = sorted({figure["length"] for figure in figures})
    with picture(path, 7, 2.6) as canvas:
        panels = canvas.subplots(1, 2)
        names = ("tokens_per_second", "peak_gib")
        for axes, name, title in zip(panels, names, ("tokens/s", "activations, GiB"), strict=True):
            for length in lengths:
                points = [(figure["segments"], figure[name]) for figure in figures if figure["length"] == length]
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{length:,} tokens")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({figure["segments"] for figure in figures}))
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.margins(y=0.1)
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.set_xlabel("segments")
            axes.set_title(title)
        panels[0].legend()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "json", type=Path, nargs="*", help="written by scripts/gpu_test.sh; default: docs/measured.json"
    )
    parser.add_argument("--name", default="measured", help="of the page and of what is kept; default: measured")
    args = parser.parse_args(argv)
    sources = args.json
    kept = DOCS / f"{args.name}.json"
    picture_file = DOCS / "images" / f"{args.name}.svg"
    if not sources and kept.exists():
        sources = [kept]
    result = None
    if sources:
        try:
            result = to_builtins(joined([read_result(source) for source in sources]))
        except ValueError as error:
            raise SystemExit(f"error: {error}.") from error
    page = page_of(result, args.name)
    if result is not None:
        picture_file.unlink(missing_ok=True)
        if figures := drawn(result):
            plot(figures, picture_file)
        kept.write_text(f"{json.dumps(result, indent=1)}\n", encoding="utf-8")
    (DOCS / f"{args.name}.md").write_text(page, encoding="utf-8")


def read_result(source: Path) -> Result:
    """What scripts/gpu_test.sh has written on a GPU. Raises ValueError for another file."""
    try:
        result = read_json(source, Result)
    except ValueError as error:
        raise ValueError(f"{error}; give a file that scripts/gpu_test.sh has written") from error
    if result.device == "CPU" or result.tiny:
        raise ValueError(f"{source} has sizes that measure nothing: run scripts/gpu_test.sh on a GPU")
    return result


def joined(results: Sequence[Result]) -> Result:
    """One result of several calls on devices of one kind: of a section that ran in several of them, the last. Raises
    ValueError for devices of several kinds."""
    devices = sorted({result.device for result in results})
    if len(devices) > 1:
        raise ValueError(f"the files are of {' and of '.join(devices)}; give those of one")
    sections = {section.title: section for result in results for section in result.sections}
    return Result(results[-1].date, devices[0], results[-1].tiny, list(sections.values()))


if __name__ == "__main__":
    main()
