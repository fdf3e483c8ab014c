"""Where segments pay: the gain over Megatron's own schedules, by network, number of GPUs and tokens of a step.

    seq1f1b gain-map --model llama3-70b --seq-length 131072 --machine h100-80gb --gpus 64 256 \\
        --tokens 2e6 8e6 --bandwidths 50 400 --output gains.csv --picture

Every cell is two searches of the planner, of seconds to minutes, and a line of --output as soon as it is found. What is
in that file is not computed again, but for a last line that is cut off. docs/planning.md lists what Megatron is
credited with.
"""

# Tested in commands/test_plan.py.

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from ..costs.machine import Machine, read_machine
from ..files import At0, Count, Positive, read_rows, with_way_out
from ..planner.gain import Gain
from ..planner.search import Plan, Search
from ..planner.space import Question
from ..report.style import picture
from ..report.text import aligned
from ..schedule import named, read_bytes
from .model_flags import PRESETS, preset
from .parsing import Parser, amount, amount_or_0, count, count_up_to, output_path
from .plan import add_machine, show
from .plan_text import short_name


class Cell(Struct, frozen=True):
    """A line of a map: what was asked, and the best steps: their seconds, None where nothing fits, and their bubble
    ratio."""

    model: str
    machine: str
    seq_length: Count
    bandwidth: Positive
    host_bandwidth: At0  # 0: nothing moves to the host
    gpus: Count
    batch: Count
    seconds: Positive | None
    bubble_ratio: At0 | None
    configuration: str
    megatron_seconds: Positive | None
    megatron_bubble_ratio: At0 | None
    megatron_configuration: str

    @property
    def question(self) -> tuple[str, str, int, float, float, int, int]:
        return (
            self.model,
            self.machine,
            self.seq_length,
            self.bandwidth,
            self.host_bandwidth,
            self.gpus,
            self.batch,
        )

    def named_words(self) -> dict[str, str]:
        """The values as they stand in the line."""
        return {name: _word(getattr(self, name)) for name in _NAMES}


def _word(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


_NAMES = [field.name for field in structs.fields(Cell)]


def make_parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--model", choices=PRESETS, required=True, metavar="NAME", help=", ".join(PRESETS))
    add("--seq-length", type=count, required=True, metavar="TOKENS", help="of a sequence; required")
    add_machine(parser, "h100-80gb")
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
    cells = []
    batches = sorted({max(1, round(tokens / args.seq_length)) for tokens in args.tokens})
    bandwidths = args.bandwidths or [machine.network.bandwidth / 1e9]
    host_bandwidths = args.host_bandwidths or [machine.device.host_bandwidth / 1e9]
    wanted = list(product(bandwidths, host_bandwidths, args.gpus, batches))
    known = {cell.question: cell for cell in read_cells(args.output)}
    if args.output.exists():
        os.truncate(args.output, _size_of_lines(args.output.read_bytes()))
    for number, (bandwidth, host_bandwidth, devices, batch) in enumerate(wanted, start=1):
        key = (
            args.model,
            args.machine,
            args.seq_length,
            float(f"{bandwidth:g}"),
            float(f"{host_bandwidth:g}"),
            devices,
            batch,
        )
        if key not in known:
            linked = with_links(machine, 1e9 * bandwidth, 1e9 * host_bandwidth)
            room = linked.device.host_memory_gib
            search = Search(Question(preset(args.model), linked, devices, args.seq_length, batch, host_gib=room))
            ours = next(iter(search.best(1)), None)
            megatron = search.megatron_baseline()
            known[key] = Cell(*key, *_step(ours), *_step(megatron))
            append_cell(args.output, known[key])
        cells.append(known[key])
        show(number, len(wanted))
    shown = {
        "bandwidth": "GB/s a node",
        "host_bandwidth": "to the host",
        "gpus": "GPUs",
        "batch": "sequences",
        "seconds": "step s",
        "configuration": "best",
        "megatron_seconds": "Megatron s",
        "megatron_configuration": "Megatron's best",
    }
    rows = ([*(cell.named_words()[name] for name in shown), str(gain_of(cell))] for cell in cells)
    print("\n".join(aligned([[*shown.values(), "gain"], *rows])))
    if args.picture:
        title = f"gain of segments, {args.model}, {args.seq_length} tokens, {machine.device.name}"
        plot_gains(cells, title, args.output.with_suffix(".png"))


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


def _step(plan: Plan | None) -> tuple[float | None, float | None, str]:
    """The seconds of a step, its bubble ratio and its configuration."""
    if plan is None:
        return None, None, "-"
    ratio = float(f"{plan.prediction.bubble:.3f}")
    return float(f"{plan.seconds:.4g}"), ratio, short_name(plan) or "data parallel"


def gain_of(cell: Cell) -> Gain:
    ours, megatron = (each and 1 / each for each in (cell.seconds, cell.megatron_seconds))
    return Gain(ours, megatron, read_machine(cell.machine).error_of(preset(cell.model)))


def read_cells(path: Path) -> list[Cell]:
    """The cells of a map, none if there is no such file. A line that a killed run has not finished does not count.
    Raises ValueError for another file."""
    content = read_bytes(path) if path.exists() else b""
    size = _size_of_lines(content)
    try:
        return list(read_rows(path, Cell, content[:size])) if size else []
    except ValueError as error:
        raise with_way_out(error, "mend it, or name another --output") from None


def append_cell(path: Path, cell: Cell) -> None:
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            if not file.tell():
                lines.writerow(_NAMES)
            lines.writerow(cell.named_words().values())
    except OSError as error:
        raise named(error, path) from None


def _size_of_lines(content: bytes) -> int:
    """The bytes of the lines of a map that are complete."""
    is_begun = ",".join(_NAMES).encode().startswith(content)  # with its first line
    return 0 if is_begun else content.rfind(b"\n") + 1 or len(content)


def plot_gains(cells: Sequence[Cell], title: str, path: Path) -> None:
    """One panel for each number of sequences, with the gain in percent: grey where it is within the error, white where
    there is no cell. Of several rates to the host, the slowest that moves something is shown."""
    import numpy as np

    rates = {cell.host_bandwidth for cell in cells}
    slowest = min(rates - {0.0}, default=0.0)
    cells = [cell for cell in cells if cell.host_bandwidth == slowest]
    values = {(cell.bandwidth, cell.gpus, cell.batch): gain_of(cell).value for cell in cells}
    error = 100 * gain_of(cells[0]).error
    bandwidths, _, batches = (sorted(set(each)) for each in zip(*values, strict=True))
    devices = {batch: sorted({gpus for _, gpus, of_batch in values if of_batch == batch}) for batch in batches}
    columns = [len(devices[batch]) for batch in batches]
    with picture(path, 2 + 0.3 * len(batches) + 0.9 * sum(columns), 3.4) as figure:
        panels = figure.subplots(1, len(batches), squeeze=False, sharey=True, width_ratios=columns)[0]
        for axes, batch in zip(panels, batches, strict=True):
            found = [[values.get((speed, gpus, batch)) for gpus in devices[batch]] for speed in bandwidths]
            gains = np.array([[nan if gain is None else 100 * gain for gain in row] for row in found])
            is_known = np.ma.masked_invalid(gains)
            axes.imshow(is_known, cmap="Greys", vmin=-100, vmax=300, origin="lower", aspect="auto")
            shown = np.ma.masked_inside(is_known, -error, error)
            image = axes.imshow(shown, cmap="RdYlGn", vmin=-40, vmax=40, origin="lower", aspect="auto")
            for (row, column), gain in np.ndenumerate(gains):
                if not np.isnan(gain):
                    axes.annotate(f"{gain:+.0f}", (column, row), ha="center", va="center")
            axes.set_xticks(range(len(devices[batch])), devices[batch])
            axes.set_yticks(range(len(bandwidths)), [f"{each:g}" for each in bandwidths])
            axes.set(xlabel="GPUs", title=f"{batch} sequences")
        figure.colorbar(image, label="gain, %; grey: within error")
        panels[0].set_ylabel("GB/s of a node")
        figure.suptitle(title)
