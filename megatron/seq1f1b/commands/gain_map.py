"""Where segments pay: the gain over Megatron's own schedules, by network, number of GPUs and tokens of a step.

    seq1f1b gain-map --model llama3-70b --seq-length 131072 --machine h100-80gb --gpus 64 256 \\
        --tokens 2e6 8e6 --bandwidths 50 400 --output gains.csv --picture

Every cell is two searches of the planner, of seconds to minutes, and a line of --output as soon as it is found. What is
in that file is not computed again, but for a last line that is cut off. docs/planning.md lists what Megatron is
credited with.
"""

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from ..costs.machine import read_machine
from ..files import Count, Positive, read_rows, with_way_out
from ..planner.gain import Gain
from ..planner.search import Plan, Search
from ..planner.space import Question
from ..report.style import picture
from ..report.text import aligned
from ..schedule import named, read_bytes
from .model_flags import PRESETS, preset
from .parsing import Parser, amount, count, count_up_to, output_path
from .plan import add_machine, show
from .plan_text import short_name


class Cell(Struct, frozen=True):
    """A line of a map: what was asked, and the seconds of the best steps, None where nothing fits."""

    model: str
    machine: str
    seq_length: Count
    bandwidth: Positive
    gpus: Count
    batch: Count
    seconds: Positive | None
    configuration: str
    megatron_seconds: Positive | None
    megatron_configuration: str

    @property
    def question(self) -> tuple[str, str, int, float, int, int]:
        return self.model, self.machine, self.seq_length, self.bandwidth, self.gpus, self.batch

    def named_words(self) -> dict[str, str]:
        """The values as they stand in the line."""
        return {name: _word(getattr(self, name)) for name in _NAMES}


def _word(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


_NAMES = [field.name for field in structs.fields(Cell)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--model", choices=PRESETS, required=True, metavar="NAME", help=", ".join(PRESETS))
    add("--seq-length", type=count, required=True, metavar="TOKENS", help="of a sequence; required")
    add_machine(parser, "h100-80gb")
    add("--gpus", type=count_up_to(10**6), nargs="+", required=True, metavar="N", help="numbers of GPUs; required")
    add("--tokens", type=amount, nargs="+", required=True, help="of a step, such as 4e6; required")
    what = "GB/s of a node to others, as collectives reach them; default: the machine's"
    add("--bandwidths", type=amount, nargs="+", metavar="GB/S", help=what)
    add("--output", type=output_path(".csv"), required=True, help="cells as .csv; those there are kept; required")
    add("--picture", action="store_true", help="a picture beside --output, as .png (needs matplotlib)")
    args = parser.parse_args(argv)
    machine = read_machine(args.machine)
    cells = []
    network = machine.network
    host = machine.device.host_memory_gib
    batches = sorted({max(1, round(tokens / args.seq_length)) for tokens in args.tokens})
    wanted = list(product(args.bandwidths or [network.bandwidth / 1e9], args.gpus, batches))
    known = {cell.question: cell for cell in read_cells(args.output)}
    if args.output.exists():
        os.truncate(args.output, _size_of_lines(args.output.read_bytes()))
    for number, (bandwidth, devices, batch) in enumerate(wanted, start=1):
        key = (args.model, args.machine, args.seq_length, float(f"{bandwidth:g}"), devices, batch)
        if key not in known:
            # One message reaches as large a share of the bandwidth as before.
            scale = 1e9 * bandwidth / network.bandwidth
            scaled = structs.replace(
                network, bandwidth=1e9 * bandwidth, message_bandwidth=scale * network.message_bandwidth
            )
            linked = replace(machine, network=scaled)
            search = Search(Question(preset(args.model), linked, devices, args.seq_length, batch, host_gib=host))
            ours = next(iter(search.best(1)), None)
            megatron = search.of_megatron()
            known[key] = Cell(*key, *_step_and_name(ours), *_step_and_name(megatron))
            append_cell(args.output, known[key])
        cells.append(known[key])
        show(number, len(wanted))
    names = ["GB/s a node", "GPUs", "sequences", "step s", "best", "Megatron s", "Megatron's best", "gain"]
    shown = ("bandwidth", "gpus", "batch", "seconds", "configuration", "megatron_seconds", "megatron_configuration")
    rows = ([*(cell.named_words()[name] for name in shown), str(gain_of(cell))] for cell in cells)
    print("\n".join(aligned([names, *rows])))
    if args.picture:
        title = f"gain of segments, {args.model}, {args.seq_length} tokens, {machine.device.name}"
        plot_gains(cells, title, args.output.with_suffix(".png"))


def _step_and_name(plan: Plan | None) -> tuple[float | None, str]:
    return (None, "-") if plan is None else (float(f"{plan.seconds:.4g}"), short_name(plan) or "data parallel")


def gain_of(cell: Cell) -> Gain:
    ours, megatron = (each and 1 / each for each in (cell.seconds, cell.megatron_seconds))
    return Gain(ours, megatron, read_machine(cell.machine).error)


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
    """One panel for each number of sequences, with the gain in percent; grey where that is within the error."""
    import numpy as np

    values = {(cell.bandwidth, cell.gpus, cell.batch): gain_of(cell).value for cell in cells}
    error = 100 * read_machine(cells[0].machine).error
    bandwidths, devices, batches = (sorted(set(each)) for each in zip(*values, strict=True))
    with picture(path, 1 + 3.2 * len(batches), 3.4) as figure:
        panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
        for axes, batch in zip(panels, batches, strict=True):
            found = [[values.get((speed, gpus, batch)) for gpus in devices] for speed in bandwidths]
            gains = np.array([[nan if gain is None else 100 * gain for gain in row] for row in found])
            shown = np.ma.masked_inside(np.ma.masked_invalid(gains), -error, error)
            image = axes.imshow(shown, cmap="RdYlGn", vmin=-40, vmax=40, origin="lower", aspect="auto")
            axes.set_facecolor("#cccccc")
            for (row, column), gain in np.ndenumerate(gains):
                axes.annotate("-" if np.isnan(gain) else f"{gain:+.0f}", (column, row), ha="center", va="center")
            axes.set_xticks(range(len(devices)), devices)
            axes.set_yticks(range(len(bandwidths)), [f"{each:g}" for each in bandwidths])
            axes.set(xlabel="GPUs", title=f"{batch} sequences a step")
        figure.colorbar(image, label="gain, %; grey: within error")
        panels[0].set_ylabel("GB/s of a node")
        figure.suptitle(title)
