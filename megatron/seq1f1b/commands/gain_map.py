"""Where segments pay: the gain over Megatron's own schedules, by network, number of GPUs and tokens of a step.

    seq1f1b gain-map --model llama3-70b --seq-length 131072 --machine h100-80gb --gpus 64 256 \\
        --tokens 2e6 8e6 --bandwidths 50 400 --output gains.csv --picture

Every cell is two searches of the planner, of seconds to minutes, and a line of --output as soon as it is found. What is
in that file is not computed again, but for a last line that is cut off. docs/planning.md lists what Megatron is
credited with.
"""

# Tested in commands/test_plan.py.

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from ..costs.machine import Machine, read_machine
from ..planner.gain import Gain
from ..planner.search import Plan, Search
from ..planner.space import Question
from ..report.gain_figure import Place, plot_gain_map
from ..report.text import aligned
from .gain_cells import Cell, CellQuestion, append_cell, cut_unfinished_line, read_cells
from .model_flags import PRESETS, preset
from .parsing import MOST_SEQUENCES, Parser, amount, amount_or_0, count_up_to, output_path, sequence_length
from .plan_text import short_name
from .progress import show


def make_parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--model", choices=PRESETS, required=True, metavar="NAME", help=", ".join(PRESETS))
    add("--seq-length", type=sequence_length, required=True, metavar="TOKENS", help="of a sequence; required")
    parser.add_machine("h100-80gb")
    add("--gpus", type=count_up_to(10**6), nargs="+", required=True, metavar="N", help="numbers of GPUs; required")
    add("--tokens", type=amount, nargs="+", required=True, help="of a step, such as 4e6; required")
    what = "GB/s of a node to others, as collectives reach them; default: the machine's"
    add("--bandwidths", type=amount, nargs="+", metavar="GB/S", help=what)
    what = "GB/s each way between a GPU and its host while all copy, 0: nothing moves there; default: the machine's"
    add("--host-bandwidths", type=amount_or_0, nargs="+", metavar="GB/S", help=what)
    cells = "cells as .csv; those there are kept; required"
    add("--output", type=output_path(".csv"), required=True, metavar="FILE.csv", help=cells)
    add("--picture", action="store_true", help="a picture beside --output, as .png (needs matplotlib)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    machine = read_machine(args.machine)
    known = {cell.asked: cell for cell in read_cells(args.output)}
    cut_unfinished_line(args.output)
    cells = []
    wanted = asked_cells(args, machine)
    for number, asked in enumerate(wanted, start=1):
        if asked not in known:
            known[asked] = found_cell(asked, machine)
            append_cell(args.output, known[asked])
        cells.append(known[asked])
        show(number, len(wanted))
    print(table(cells))
    if args.picture:
        title = f"gain of segments, {args.model}, {args.seq_length} tokens, {machine.device.name}"
        plot_gains(cells, title, args.output.with_suffix(".png"))


def asked_cells(args: argparse.Namespace, machine: Machine) -> list[CellQuestion]:
    """The cells that the flags ask for."""
    if min(args.tokens) < args.seq_length:
        raise ValueError(
            f"--tokens {min(args.tokens):g} is a step of less than one sequence of --seq-length {args.seq_length}; "
            "give more, such as 4e6"
        )
    batches = sorted({round(tokens / args.seq_length) for tokens in args.tokens})
    if batches[-1] > MOST_SEQUENCES:
        raise ValueError(
            f"--tokens {max(args.tokens):g} is a step of {batches[-1]:,} sequences of --seq-length {args.seq_length}; "
            f"the most are {MOST_SEQUENCES:,}"
        )
    bandwidths = args.bandwidths or [machine.network.bandwidth / 1e9]
    host_bandwidths = args.host_bandwidths or [machine.device.host_bandwidth / 1e9]
    return [
        CellQuestion(
            model=args.model,
            machine=args.machine,
            seq_length=args.seq_length,
            bandwidth=float(f"{bandwidth:g}"),
            host_bandwidth=float(f"{host_bandwidth:g}"),
            gpus=gpus,
            batch=batch,
        )
        for bandwidth, host_bandwidth, gpus, batch in product(bandwidths, host_bandwidths, args.gpus, batches)
    ]


def found_cell(asked: CellQuestion, machine: Machine) -> Cell:
    """Search for the best step of either side."""
    linked = with_links(machine, 1e9 * asked.bandwidth, 1e9 * asked.host_bandwidth)
    search = Search(
        Question(
            model=preset(asked.model),
            machine=linked,
            num_devices=asked.gpus,
            sequence_length=asked.seq_length,
            global_batch_size=asked.batch,
            host_gib=linked.device.host_memory_gib,
        )
    )
    plans = search.best(1)
    ours = _step(plans[0] if plans else None)
    megatron = _step(search.megatron_baseline())
    return Cell(
        **asked._asdict(),
        seconds=ours.seconds,
        bubble_ratio=ours.bubble_ratio,
        configuration=ours.configuration,
        megatron_seconds=megatron.seconds,
        megatron_bubble_ratio=megatron.bubble_ratio,
        megatron_configuration=megatron.configuration,
    )


def table(cells: Sequence[Cell]) -> str:
    """A line for each cell, with its gain."""
    titles = {
        "bandwidth": "GB/s a node",
        "host_bandwidth": "to the host",
        "gpus": "GPUs",
        "batch": "sequences",
        "seconds": "step s",
        "configuration": "best",
        "megatron_seconds": "Megatron s",
        "megatron_configuration": "Megatron's best",
    }
    rows = [[*titles.values(), "gain"]]
    for cell in cells:
        words = cell.named_words()
        rows.append([*(words[name] for name in titles), str(gain_of(cell))])
    return "\n".join(aligned(rows))


def with_links(machine: Machine, bandwidth: float, host_bandwidth: float) -> Machine:
    """The machine with other bytes/s between nodes, and between a device and its host; 0 is no memory there. One
    message between nodes reaches as large a share of the bandwidth as before."""
    network = machine.network
    scale = bandwidth / network.bandwidth
    memory = machine.device.host_memory_gib if host_bandwidth else 0.0
    return replace(
        machine,
        network=structs.replace(network, bandwidth=bandwidth, message_bandwidth=scale * network.message_bandwidth),
        device=structs.replace(machine.device, host_bandwidth=host_bandwidth, host_memory_gib=memory),
    )


class _Step(NamedTuple):
    """The best step of one side as it stands in the line of a cell."""

    seconds: float | None
    bubble_ratio: float | None
    configuration: str


def _step(plan: Plan | None) -> _Step:
    if plan is None:
        return _Step(seconds=None, bubble_ratio=None, configuration="-")
    return _Step(
        seconds=float(f"{plan.seconds:.4g}"),
        bubble_ratio=float(f"{plan.prediction.bubble:.3f}"),
        configuration=short_name(plan) or "data parallel",
    )


def gain_of(cell: Cell) -> Gain:
    """The gain in steps a second, with the error of predictions for this machine and model."""
    ours = None if cell.seconds is None else 1 / cell.seconds
    megatron = None if cell.megatron_seconds is None else 1 / cell.megatron_seconds
    return Gain(ours, megatron, read_machine(cell.machine).error_of(preset(cell.model)))


def plot_gains(cells: Sequence[Cell], title: str, path: Path) -> None:
    """Draw the gains of cells. Of several rates to the host, the slowest that moves something is shown."""
    rates = {cell.host_bandwidth for cell in cells}
    slowest = min(rates - {0.0}, default=0.0)
    shown = [cell for cell in cells if cell.host_bandwidth == slowest]
    gains = {Place(cell.bandwidth, cell.gpus, cell.batch): gain_of(cell).value for cell in shown}
    plot_gain_map(gains, gain_of(shown[0]).error, title, path)
