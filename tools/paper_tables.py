#!/usr/bin/env python3
"""Published, predicted and measured figures side by side, with errors: a summary as Markdown, all rows as CSV.

    python tools/paper_tables.py --held-out --output docs/paper_tables.md --picture docs/images/paper_tables.png
    python tools/paper_tables.py --reference DIR

--reference names a folder with tables of yours, of the names and columns of those in tools/paper/reference; its README
tells which one takes which runs. Tables that the folder lacks are left out. --logs names a folder of training logs that
the launchers of scripts/paper left; what they measured joins the table.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from itertools import groupby
from pathlib import Path

from megatron.seq1f1b.commands.compare import read_training_log
from megatron.seq1f1b.report.style import picture
from paper import (
    allocator,
    blackwell,
    held_out,
    hopper,
    long_sequences,
    megatron_tables,
    seq1f1b_tables,
    terapipe_tables,
    vtrain,
    zero_bubble,
)
from paper.row import REFERENCE, Errors, Row, slug

SOURCES: tuple[Callable[[Path], Iterable[Row]], ...] = (
    vtrain.multi_node,
    vtrain.single_node,
    megatron_tables.recomputation,
    megatron_tables.further_recomputation,
    megatron_tables.activations,
    megatron_tables.sc21,
    seq1f1b_tables.throughput,
    seq1f1b_tables.memory,
    seq1f1b_tables.mean_memory,
    seq1f1b_tables.third_party,
    seq1f1b_tables.allocated,
    terapipe_tables.latencies,
    terapipe_tables.gains,
    terapipe_tables.further_latencies,
    terapipe_tables.further_gains,
    zero_bubble.bubble_rates,
    zero_bubble.memory,
    long_sequences.memory_model,
    long_sequences.ultra_long,
    long_sequences.longest_sequence,
    zero_bubble.large_vocabularies,
    hopper.kwai,
    hopper.memory_of_kwai,
    hopper.summary,
    hopper.other_mixtures,
    hopper.long,
    hopper.meta,
    blackwell.summary,
)
# Goals: mean error of a table, largest error of a row; None where there is no goal.
GOALS: dict[str, tuple[float | None, float | None]] = {
    "vTrain multi-node": (0.08, 0.20),
    "vTrain single node": (0.08, None),
    "Megatron recomputation table 5": (None, 0.06),
    "Megatron recomputation table 5, further": (None, 0.06),
    "Megatron activations, figure 1": (None, 0.10),
    "Megatron SC21 table 1": (None, 0.08),
    "Seq1F1B 7B throughput": (None, 0.08),
    "Seq1F1B memory": (None, 0.10),
    "Seq1F1B memory, mean of the stages": (None, 0.10),
    "Seq1F1B third-party runs": (None, 0.08),
    "Seq1F1B third-party memory": (None, 0.10),
    "Seq1F1B third-party memory, allocated": (None, 0.10),
    "TeraPipe latencies": (None, 0.15),
    "TeraPipe, gain of slices": (None, 0.05),
    "TeraPipe latencies, further": (None, 0.15),
    "TeraPipe, gain of slices, further": (None, 0.05),
    "Zero Bubble bubble rates": (None, 0.01),
    "Zero Bubble, auto above ZB-2p": (None, 0.01),
    "Zero Bubble memory": (None, 0.10),
    "SlimPipe memory model": (0.05, None),
    "SlimPipe memory model, ultra-long": (0.15, None),
    "SlimPipe, longest sequences": (None, 0.15),
    "Large vocabularies": (0.08, 0.20),
    hopper.WITHOUT_OFFLOAD: (0.08, 0.20),
    hopper.WITH_OFFLOAD: (0.08, 0.20),
    hopper.MEMORY: (None, 0.10),
    hopper.SUMMARY: (0.08, 0.20),
    hopper.MIXTURES: (0.10, 0.20),
    hopper.OTHER_MIXTURES: (0.10, 0.20),
    hopper.LONG: (0.08, 0.20),
    hopper.META: (0.08, 0.20),
    blackwell.TABLE: (None, 0.20),
}

# What stands before the tables of docs/paper_tables.md.
HEAD = """\
# Published tables

Written by `python tools/paper_tables.py --held-out --output docs/paper_tables.md`, with
[all rows as CSV](paper_tables.csv). Machine files in `megatron/seq1f1b/costs/machines/` hold every
constant with its source and which were fitted, on what; [Planning a run](planning.md#which-machine-file) has
what a user may expect, and how to hold [runs of your own](planning.md#your-own-runs-against-the-prediction) against it.

![The error of every row, by table: most lie within 8 %](images/paper_tables.png)
"""

# What is common to the rows with large errors, as far as known.
MISSES = """\
What is off, and why, as far as we found:

- vTrain multi-node: three of 55 rows are predicted more than 20 % too fast. The two with TP 2, DP 16, PP 16 take 11 s
  and 7 s more than predicted: 0.22 s for each of their 47 and 31 pipeline slots, equal for micro-batches of 3 and of 6.
  So the cause is neither compute nor bandwidth, and the bytes sent need less than 0.5 s on this cluster. On the same
  512 GPUs with the same TP 2, 175B shows nothing of it (2 % off). With TP 4, DP 16, PP 8 the excess is 0.04 s, 0.08 s,
  0 and 0 s a slot for micro-batches of 2, 3, 6 and 12: it comes and goes with the run. The third row (3.6B, TP 8,
  micro-batch 2) takes 9.2 ms a layer, 1.7 times as long as the same layout with the same tokens in micro-batches of 8,
  and 2.4 times as long as one node takes to launch it. Nothing is fitted to these rows.
- Megatron recomputation: 175B and 1T were added after all constants were fixed; nothing is fitted to them.
- Seq1F1B: the number of chunks of Seq1F1B-I is not published; the authors' script tries two and four. Its memory fits
  two in all four models (four would take 13 to 26 % less); its times fit four (3 % off; two would be up to 15 % faster,
  and the order of the methods wrong in five groups). The tables of times assume four, those of memory two.
- Seq1F1B memory: nothing is fitted to these rows, and three are more than 10 % off. With 1F1B, 13B takes 5 GiB more at
  65536 tokens than at 49152, and at 49152 14 GiB more than at 32768; its first stage is within a GiB of the limit. For
  7B at 32768 tokens with 1F1B-I, and for one of the third party's 40 stages, we predict 10.2 and 10.3 % too little.
- TeraPipe: its code is modelled as it runs. Separate kernels add weight gradients after a message has left, 3.8 ms a
  slice for 175B; without them, 128 slices would take 2.1 s, not 3.1. The slices of settings 1, 6 and of figure 7 are
  not in the sources; the number of equal slices that is fastest by prediction stands for them. Published times of
  setting 1 spread by 7 % and 13 %, more than the error of its gain. In figure 6(a), 4, 8 and 16 slices take the same
  time to 1 %; by prediction eight are a tenth faster than four. In setting 5 a slice of 700 tokens takes 0.375 of the
  time of the whole sequence as published, and 0.405 by prediction, since its products leave half of the multiprocessors
  idle by our count of tiles.
- Zero Bubble: ZB-2p has no counterpart here; `auto` shortens the step in the same memory instead. All ranks take the
  optimizer step together, so a step is no shorter than the work of its last rank, which starts when the first forward
  arrives; `auto` reaches that bound in all six rows. ZB-2p lets every rank start and end on its own, which improves its
  rate but shortens no single step; for `auto` that is a secondary aim, and the goal is to idle at most 0.010 more than
  ZB-2p. Idling less is no miss: in the first row its ranks idle 0.023 of the time instead of 0.043.
- SlimPipe: the published memory is the authors' model, not a measurement, and nothing is fitted to it. The row with
  whole sequences recomputes all layers: the authors count the recomputed activations, 4 GiB; we add their gradients and
  the gathered inputs of products, 8 GiB. At two and three million tokens they count gradients of keys and values, 8 to
  20 GiB, for all chunks at once, and we for the chunk at work. Left out are models of unpublished sizes; among the
  longest sequences, those of SlimPipe itself, which moves keys and values between ranks, and those of interleaved 1F1B,
  for which 80K to 92K were tried: here 117K fit.
- Large vocabularies: 1F1B is at most 3 % off. Where layers move away from the last stage and the vocabulary has 256,000
  entries, we assume that this stage keeps none, and predict 9 % more; with one layer kept it would be 22 %.
- Hopper, 89 rows of times in seven tables: two constants of dense models are fitted to nine of their 46 rows, the six
  of Kwai without offload and those of 64K, 256K and 1024K tokens of NVIDIA's long sequences; one of mixtures, and its
  factor for 8 bits, to three of their 43 (qwen3-235b-a22b with TP 4, EP 8 and with PP 32, EP 8; qwen3-30b-a3b in
  release 26.02), and two are measured on the runs of two more (qwen3-30b-a3b with HybridEP). Offload moves 30 GB/s per
  GPU; with 50, or 25, Kwai's rows are as far off. Its tensor-parallel collectives overlap products; ours do not, as
  in Megatron without --tp-comm-overlap, so rows with TP 4 come out too slow. 65B on 256 GPUs without offload is
  published as out of memory; we predict 75 of 79 GiB.
- 8 bits: rates of products and bytes of casts are published or counted (tools/paper/hopper.py), none is fitted. The
  projection to the vocabulary counts as in 8 bits, though it has 16 in Megatron; counted so, dense models would be
  predicted 4 % slower. With a scale for each block DeepSeek-V3 was measured 2 % slower than with one for each tensor,
  and is predicted 8 %.
- Mixtures: the 38 rows of which no constant comes are 6.5 % off in the mean, 18 % at worst; the three that are fitted
  11 and 18 %. Their sizes are those of the recipe of the release, where NVIDIA's page has those of an earlier one:
  gpt-oss-120b and qwen3-30b-a3b in 25.11 ran with micro-batches of 1, the latter in 24 chunks, and qwen3-30b-a3b in
  26.02.01 without a pipeline. Whether gradients overlap, and are summed in 16 bit, which loss runs and what is
  computed again are those of the recipes, too. Runs with dropped tokens are left out.
- Mixtures, what explains their times. What the host launches for each expert of a rank, more in 8 bits: a stage takes
  as long as its host or its device, whichever takes longer. In a forward the host waits for the counts of tokens, with
  every dispatcher, and the device then for the host: 0.61 ms a layer, by NVIDIA's profile of qwen3-30b-a3b with
  HybridEP, where kernels ran for 22.8 s of a step of 24.7. A flex dispatcher (DeepEP, HybridEP) sends a token once to
  each node, and from there to the ranks, as long as HybridEP was measured to take. Beside another micro-batch 37 % of
  an exchange passes, by the same profile, and nothing waits for counts. In 8 bits there are casts, and padded copies
  of the tokens of experts; in gpt-oss the biases of experts, which Megatron adds one expert after the other, clamps
  before activation functions, windows and small heads; in Qwen3-Next its prediction head, gradients that overlap with
  nothing and the kernels of its recurrence; fused losses. For qwen3-30b-a3b on 16 GPUs HybridEP was measured 40 %
  faster a step than `alltoall`, which sorted tokens without fused kernels, and is predicted 29 %; the exchange beside
  other micro-batches 15 %, and 18 % predicted; for qwen3-235b-a22b with DeepEP 11, and 15 %.
- Mixtures, more than 10 % off. gpt-oss-120b (11 to 15 % too fast; see below). Two rows in 16 bit with 16 experts a rank
  wait for their host: with `alltoall` (18 % too fast) it does more than with DeepEP (16 % too slow), and one constant
  stands between them. CUDA graphs of routers alone are not counted: with them, in a later version, qwen3-235b-a22b with
  DeepEP took 14 % less, and is predicted 17 % too slow, though by our count it does not wait for its host. 64K and 128K
  tokens of it (12 and 18 % too fast) are four and eight times as many for a ring of attention as 16K (6 %), for the
  same experts. Mixtral-8x22B in 16 bit is 11 % too slow; its products, which are 87 % of its layers by prediction, are
  faster than those of the dense models that their rate is fitted to. `alltoall` of qwen3-30b-a3b, without fused
  sorting, is 13 % too fast, and DeepSeek-V3 in 8 bits with a scale for each tensor 11 %.
- gpt-oss-120b was predicted 14 to 19 % too fast on H100, 16 to 49 % on Blackwell, by about as much a token on all
  devices. So the missing time gains nothing from faster memory or tensor cores: PyTorch's kernels read operands that
  repeat or are parts of rows, as those of its biases and clamps, number by number, and compute 295e9 results/s on H200,
  1.18 TB/s where other kernels move 2.5 to 3.5 (tile-ai/TileOPs, pull request 500). These count now, and windows by
  blocks and heads of 64 as cuDNN was measured; of one row, 25.11, the recipe names modules to compute again, and
  Megatron computes none.
- gpt-oss-120b, looked at, and not the cause of the rest. Casts and padding of 8 bits: all its rows have 16. Tiles:
  2,880 are 22.5 of 128, which takes 2 to 7 % of products, and counts. Sizes, dispatchers, recomputation and losses of
  the recipes: as in the rows. Dispatch: `alltoall` and HybridEP are within 5 % as published, and exchange 1.2 ms of 25
  a layer on GB200. cuDNN's attention takes sinks, windows and heads of 64. Not known, and not counted: the host waits
  for the device where an offset of activation functions is copied to it, in each layer; and cuBLAS's kernels that sum
  gradients of biases beside products have, by their names, only instructions of Ampere in 16 bit: were they used on
  Blackwell, a layer would take 5 ms more (of 25), on H100 0.6 (of 15). The row with graphs of routers has no biases,
  clamps, windows or heads of 64.
- Blackwell: machine files of data sheets, with the efficiencies of H100 but for attention, which is published.
  DeepSeek-V3 on GB200 is predicted 7 % too fast, Qwen3-235B at most 3 % off, with CUDA graphs of all of a layer but its
  experts: without graphs one of its two runs, with 16 experts a rank, would wait for its host, and be predicted 26 %
  too slow. gpt-oss-120b is predicted 4 to 19 % too fast on B200, and 7 to 13 % on GB200. With fused kernels for biases
  and activation functions of experts, in 8 bits, NVIDIA's page has 28,672 tokens/s a GB200 (26.08) where it has 16,640
  in 16 bit, and 18,304 in the release in which such a kernel was ten times as slow (cudnn-frontend, issue 256).
- No rows, since another program ran: torchtitan's runs of 8B and 70B on 8 to 256 H100 with slower memory and 500 W
  (pytorch/torchtitan, benchmarks) would be predicted 16 to 35 % too fast, with tensor parallelism of 8B 30 to 55 %.
- Llama 3 405B: nothing is fitted to it, though its network is RoCE and its program not Megatron. With 4 chunks in place
  of 8, which follows from the text, its rows would be predicted 5 % too slow to as published.
- Kwai's memory is predicted 4 to 7 % too low where nothing is computed again, and 0 to 14 % too high where norms and
  activation functions are, since only norms are here. With 0 and 0.2 of the activations on the host it was out of
  memory where we predict 74 and 68 GiB allocated, of 79.
"""


def all_rows(progress: Callable[[str], None] = lambda text: None, folder: Path = REFERENCE) -> list[Row]:
    """The rows of all tables in a folder. Raises ValueError for a row in another format than that of REFERENCE."""
    rows: list[Row] = []
    for number, source in enumerate(SOURCES, start=1):
        progress(f"\r{number} of {len(SOURCES)} tables")
        try:
            rows += source(folder)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    progress("\r" + " " * 30 + "\r")
    return sorted(rows, key=lambda row: list(GOALS).index(row.table))


def others_in(folder: Path) -> list[Path]:
    """The .csv files of a folder that have no name of a table in REFERENCE."""
    return sorted(path for path in folder.glob("*.csv") if not (REFERENCE / path.name).is_file())


def with_logs(rows: Iterable[Row], folder: Path) -> list[Row]:
    """A log belongs to a row if its name, without `.log`, is the words of the row's label joined by `-`."""
    from dataclasses import replace

    logs = {path.stem: path for path in folder.glob("*.log")}
    found = []
    for row in rows:
        path = logs.get(slug(row.label))
        if path is None or row.unit not in ("s", "tokens/s"):
            found.append(row)
            continue
        log = read_training_log(path)
        value = log.seconds_per_iteration if row.unit == "s" else log.tokens_per_second
        found.append(replace(row, measured=value))
    return found


def wrong_orders(rows: Iterable[Row]) -> list[str]:
    """Groups of methods whose order by prediction is not the published one."""
    wrong = []
    for group, members in groupby((row for row in rows if row.group), key=lambda row: (row.table, row.group)):
        ran = [row for row in members if row.published is not None and row.predicted is not None]
        if sorted(ran, key=lambda row: row.published) != sorted(ran, key=lambda row: row.predicted):
            wrong.append(group[1])
    return wrong


def markdown(rows: Sequence[Row]) -> str:
    """The errors of each table, which runs were out of memory, and the order of methods."""
    lines = ["| table | rows | mean error | bias | worst | goal |", "|---|---|---|---|---|---|"]
    tables = {name: list(members) for name, members in groupby(rows, key=lambda row: row.table)}
    for name, members in tables.items():
        if all(row.error is None for row in members):
            continue
        errors = Errors.of(members)
        mean, worst = GOALS[name]
        goals = [f"mean {_percent(mean, members[0])}"] if mean else []
        goals += [f"worst {_percent(worst, members[0])}"] if worst else []
        met = (mean is None or errors.mean <= mean) and (worst is None or errors.worst <= worst)
        lines.append(
            f"| {name} | {errors.count} | {_percent(errors.mean, members[0])} | {_percent(errors.bias, members[0])} | "
            f"{_percent(errors.worst, members[0])} | {', '.join(goals)}: {'met' if met else 'missed'} |"
        )
    lines.append("")
    if any(row.published is None or row.predicted is None for row in rows):
        missed = [row for row in rows if (row.published is None) != (row.predicted is None)]
        lines.append(f"Out of memory where it was: {'not for ' + _labels(missed) if missed else 'everywhere'}.")
    by_methods = tables.get("Seq1F1B 7B throughput", [])
    if by_methods:
        wrong = wrong_orders(by_methods)
        lines.append(
            f"Order of the methods: {'not right for ' + '; '.join(wrong) if wrong else 'right in every group'}."
        )
    return "\n".join(lines) + "\n"


def as_csv(rows: Iterable[Row]) -> str:
    """A line for each row: what was published, predicted and measured in `unit`, and the relative error (of a bubble
    the absolute one)."""
    text = StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("table", "run", "unit", "published", "predicted", "error", "measured"))
    for row in rows:
        error = "" if row.error is None else f"{row.error:.4f}"
        measured = "" if row.measured is None else f"{row.measured:.4g}"
        published = _value(row.published, "failed or out of memory")
        predicted = _value(row.predicted, "out of memory")
        lines.writerow((row.table, row.label, row.unit, published, predicted, error, measured))
    return text.getvalue()


def _labels(rows: Iterable[Row]) -> str:
    return "; ".join(row.label for row in rows)


def _percent(value: float, row: Row) -> str:
    return f"{value:.3f}" if row.unit == "bubble" else f"{100 * value:.1f} %"


def _value(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.5g}"


# What a row compares, by its unit: the colours of the picture.
QUANTITIES = {
    "s": "seconds",
    "tokens/s": "tokens/s",
    "GiB": "memory",
    "GB": "memory",
    "times": "speed-up",
    "K tokens": "longest sequence",
}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Predicted over published: a line for each table and a point for each of its rows, which a slope keeps apart."""
    shown = [row for row in rows if row.unit in QUANTITIES and row.error is not None]
    names = list(dict.fromkeys(row.table for row in shown))
    heights: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES.values()}
    errors: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES.values()}
    for number, name in enumerate(names):
        members = sorted((row for row in shown if row.table == name), key=lambda row: row.error)
        for place, row in enumerate(members):
            quantity = QUANTITIES[row.unit]
            heights[quantity].append(number + 0.6 * (place / max(1, len(members) - 1) - 0.5))
            errors[quantity].append(100 * row.error)
    with picture(path, 9, 4.8) as figure:
        axes = figure.subplots()
        for quantity, height in heights.items():
            axes.plot(errors[quantity], height, "o", markersize=3.5, alpha=0.8, label=quantity)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.axvspan(-8, 8, color="#e8eef5", zorder=0)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("predicted over published, % (shaded: within 8 %)")
        figure.legend(loc="outside upper right", ncols=len(heights))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, help="Markdown to write, with a .csv beside it; default: standard output"
    )
    parser.add_argument("--picture", type=Path, help="a .png, .svg or .pdf to write (needs matplotlib)")
    parser.add_argument("--reference", type=Path, default=REFERENCE, metavar="DIR", help="tables of your own")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="training logs to read measured figures from")
    parser.add_argument("--held-out", action="store_true", help="also errors of rows that constants were not fitted on")
    args = parser.parse_args(argv)

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(text, end="", file=sys.stderr, flush=True)

    try:
        rows = all_rows(progress, args.reference)
    except ValueError as error:
        parser.error(f"--reference: {error}")
    unread = others_in(args.reference)
    names = ", ".join(path.name for path in unread)
    if not rows:
        reason = f"these are not: {names}" if unread else "it has no .csv with a row"
        parser.error(
            f"--reference {args.reference}: its tables need names and columns of those in tools/paper/reference, whose "
            f"README.md tells which takes which runs; {reason}"
        )
    if unread:
        print(f"Not read, since tools/paper/reference has no table of the name: {names}", file=sys.stderr)
    if args.logs is not None:
        rows = with_logs(rows, args.logs)
    text = markdown(rows)
    if args.reference == REFERENCE:
        text = f"{HEAD}\n{text}\n{MISSES}"
    if args.held_out:
        text += "\n" + held_out.markdown(held_out.held_out(progress=progress)) + "\n" + allocator.markdown()
    if args.output is None:
        print(text, as_csv(rows), sep="\n", end="")
    else:
        args.output.write_text(text, encoding="utf-8")
        args.output.with_suffix(".csv").write_text(as_csv(rows), encoding="utf-8")
    if args.picture is not None:
        plot(rows, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
