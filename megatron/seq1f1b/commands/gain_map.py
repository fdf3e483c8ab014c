"""Where segments pay: the gain over Megatron's own schedules, by network, number of GPUs and tokens of a step.

    seq1f1b gain-map --model llama3-70b --seq-length 131072 --machine h100-80gb --gpus 64 256 \\
        --tokens 2e6 8e6 --bandwidths 50 400 --output gains.csv --picture

Every cell is two searches of the planner, with all that this package has and with all that Megatron alone has, for
seconds to minutes. It is a line of --output as soon as it is found; what is in that file is not computed again, so a
map can be stopped and continued, and grow. docs/planning.md lists what Megatron is credited with.
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import nan
from pathlib import Path

from ..planning.costs.machine import Machine, read_machine
from ..planning.planner.gain import Gain
from ..planning.planner.search import Plan, Search
from ..planning.planner.space import Question
from ..report.text import aligned
from ..schedule import written_whole
from .model_flags import PRESETS, preset
from .parsing import Parser, amount, count, count_up_to, output_path
from .plan import add_machine, show
from .plan_text import short_name

_KEY = ("model", "machine", "seq_length", "bandwidth", "gpus", "batch")
_FOUND = ("seconds", "configuration", "megatron_seconds", "megatron_configuration")
_LEVELS = (-40, -20, -10, 0, 10, 20, 40)

Cell = dict[str, str]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=PRESETS, required=True, metavar="NAME", help=", ".join(PRESETS))
    parser.add_argument("--seq-length", type=count, required=True, metavar="TOKENS", help="of a sequence; required")
    add_machine(parser, "h100-80gb")
    gpus = count_up_to(10**6)
    parser.add_argument("--gpus", type=gpus, nargs="+", required=True, metavar="N", help="numbers of GPUs; required")
    parser.add_argument("--tokens", type=amount, nargs="+", required=True, help="of a step, such as 4e6; required")
    what = "GB/s of a node to others, as collectives reach them; default: the machine's"
    parser.add_argument("--bandwidths", type=amount, nargs="+", metavar="GB/S", help=what)
    parser.add_argument(
        "--output", type=output_path(".csv"), required=True, help="cells as .csv; those there are kept; required"
    )
    parser.add_argument("--picture", action="store_true", help="contours beside --output, as .png (needs matplotlib)")
    args = parser.parse_args(argv)
    machine = read_machine(args.machine)
    bandwidths = args.bandwidths or [machine.network.bandwidth / 1e9]
    batches = sorted({max(1, round(tokens / args.seq_length)) for tokens in args.tokens})
    known = {_key(cell): cell for cell in read_cells(args.output)} if args.output.is_file() else {}
    cells, wanted = [], list(product(bandwidths, args.gpus, batches))
    for number, (bandwidth, devices, batch) in enumerate(wanted, start=1):
        values = (args.model, args.machine, args.seq_length, f"{bandwidth:g}", devices, batch)
        cell = dict(zip(_KEY, map(str, values), strict=True))
        if _key(cell) not in known:
            host = machine.device.host_memory_gib
            asked = Question(
                preset(args.model), _with(machine, bandwidth), devices, args.seq_length, batch, host_gib=host
            )
            found = (*_written(fastest(asked)), *_written(fastest(asked.of_megatron())))
            cell |= dict(zip(_FOUND, found, strict=True))
            _append(cell, args.output)
        cells.append(known.get(_key(cell), cell))
        show(number, len(wanted))
    head = ["GB/s a node", "GPUs", "sequences", "step s", "best", "Megatron s", "Megatron's best", "gain"]
    columns = ("bandwidth", "gpus", "batch", *_FOUND)
    print("\n".join(aligned([head, *([*(cell[name] for name in columns), str(gain_of(cell))] for cell in cells)])))
    if args.picture:
        title = f"gain of segments, {args.model}, {args.seq_length} tokens, {machine.device.name}"
        plot_gains(cells, title, args.output.with_suffix(".png"))


def fastest(question: Question) -> Plan | None:
    return next(iter(Search(question).best(1)), None)


def _written(plan: Plan | None) -> tuple[str, str]:
    return ("", "-") if plan is None else (f"{plan.prediction.seconds:.4g}", short_name(plan) or "data parallel")


def _with(machine: Machine, bandwidth: float) -> Machine:
    """The machine with so many GB/s of a node to others; one message reaches as large a share of it as before."""
    network = machine.network
    scale = 1e9 * bandwidth / network.bandwidth
    network = replace(network, bandwidth=scale * network.bandwidth, message_bandwidth=scale * network.message_bandwidth)
    return replace(machine, network=network)


def gain_of(cell: Cell) -> Gain:
    ours, megatron = (float(cell[name]) if cell[name] else None for name in ("seconds", "megatron_seconds"))
    return Gain(ours, megatron, read_machine(cell["machine"]).error)


def _key(cell: Cell) -> tuple[str, ...]:
    return tuple(cell[name] for name in _KEY)


def read_cells(path: Path) -> list[Cell]:
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if list(lines.fieldnames or ()) != [*_KEY, *_FOUND]:
            raise ValueError(f"--output {path} exists and is no map of gains; name another file")
        return list(lines)


def _append(cell: Cell, path: Path) -> None:
    is_new = not path.is_file()
    with path.open("a", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, [*_KEY, *_FOUND])
        if is_new:
            lines.writeheader()
        lines.writerow(cell)


def plot_gains(cells: Sequence[Cell], title: str, path: Path) -> None:
    """One panel for each number of sequences; grey where the gain in percent is within the error."""
    import numpy as np
    from matplotlib.figure import Figure

    found = {}
    for cell in cells:
        gain = gain_of(cell)
        place = float(cell["bandwidth"]), int(cell["gpus"]), int(cell["batch"])
        found[place] = nan if gain.value is None else 100 * gain.value
    error = 100 * read_machine(cells[0]["machine"]).error
    bandwidths, devices, batches = (sorted(set(each)) for each in zip(*found, strict=True))
    figure = Figure(figsize=(1 + 3.2 * len(batches), 3.4), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, batch in zip(panels, batches, strict=True):
        gains = np.array([[found.get((speed, gpus, batch), nan) for gpus in devices] for speed in bandwidths])
        for row, speed in enumerate(bandwidths):
            for column, gpus in enumerate(devices):
                text = "-" if np.isnan(gains[row, column]) else f"{gains[row, column]:+.0f}"
                axes.annotate(text, (gpus, speed), fontsize=7, ha="center", va="center")
        if min(gains.shape) > 1 and np.isfinite(gains).sum() > 3:
            filled = axes.contourf(devices, bandwidths, gains, _LEVELS, cmap="RdYlGn", extend="both", alpha=0.7)
            axes.contourf(devices, bandwidths, gains, (-error, error), colors="#cccccc")
            if axes is panels[-1]:
                figure.colorbar(filled, label="gain, %; grey: within error")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlim(devices[0] / 1.3, 1.3 * devices[-1])
        axes.set_ylim(bandwidths[0] / 1.2, 1.2 * bandwidths[-1])
        axes.set_xticks(devices, map(str, devices))
        axes.set_yticks(bandwidths, [f"{each:g}" for each in bandwidths])
        axes.set_xlabel("GPUs")
        axes.set_title(f"{batch} sequences a step", fontsize=9)
    panels[0].set_ylabel("GB/s of a node")
    figure.suptitle(title, fontsize=9)
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=160)
