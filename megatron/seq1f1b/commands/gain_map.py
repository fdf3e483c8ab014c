"""Where segments pay: the gain over Megatron's own schedules, by network, number of GPUs and tokens of a step.

    seq1f1b gain-map --model llama3-70b --seq-length 131072 --machine h100-80gb --gpus 64 256 --tokens 2e6 8e6 \\
        --bandwidths 50 400 --output gains.csv --picture

Every cell is two searches of the planner, with all that this package has and with all that Megatron alone has, for
seconds to minutes. It is a line of --output as soon as it is found; what is in that file is not computed again, so a
map can be stopped and continued, and grow. docs/planning.md lists what Megatron is credited with.
"""

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from ..planning.costs.machine import Machine, read_machine
from ..planning.planner import Gain, Plan, Question, gain
from ..report.gain_map import GainAt, plot_gains
from ..report.text import aligned
from .model_flags import PRESETS, preset
from .parsing import Parser, amount, check_output, count, count_up_to
from .plan import add_machine
from .plan_text import short_name

_KEY = ("model", "machine", "seq_length", "bandwidth", "gpus", "batch")
_FOUND = ("seconds", "configuration", "megatron_seconds", "megatron_configuration")

Cell = dict[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=PRESETS, required=True, metavar="NAME", help=", ".join(PRESETS))
    parser.add_argument("--seq-length", type=count, required=True, metavar="TOKENS", help="of a sequence; required")
    add_machine(parser, "h100-80gb")
    gpus = count_up_to(10**6)
    parser.add_argument("--gpus", type=gpus, nargs="+", required=True, metavar="N", help="numbers of GPUs; required")
    parser.add_argument("--tokens", type=amount, nargs="+", required=True, help="of a step, such as 4e6; required")
    what = "GB/s of a node to others, as collectives reach them; default: the machine's"
    parser.add_argument("--bandwidths", type=amount, nargs="+", metavar="GB/S", help=what)
    parser.add_argument("--output", type=Path, required=True, help="cells as .csv; those there are kept; required")
    parser.add_argument("--picture", action="store_true", help="contours beside --output, as .png (needs matplotlib)")
    args = parser.parse_args(argv)
    check_output(args.output, ".csv")
    machine = read_machine(args.machine)
    bandwidths = args.bandwidths or [machine.network.bandwidth / 1e9]
    batches = sorted({max(1, round(tokens / args.seq_length)) for tokens in args.tokens})
    known = {_key(cell): cell for cell in _read(args.output)}
    cells, wanted = [], list(product(bandwidths, args.gpus, batches))
    for number, (bandwidth, devices, batch) in enumerate(wanted, start=1):
        values = (args.model, machine.name, args.seq_length, f"{bandwidth:g}", devices, batch)
        cell = dict(zip(_KEY, map(str, values), strict=True))
        if _key(cell) not in known:
            if sys.stderr.isatty():
                print(f"\r{number} of {len(wanted)} cells", end="", file=sys.stderr, flush=True)
            host = machine.device.host_memory_gib
            asked = Question(
                preset(args.model), _with(machine, bandwidth), devices, args.seq_length, batch, host_gib=host
            )
            _, ours, megatron = gain(asked)
            cell |= dict(zip(_FOUND, (*_written(ours), *_written(megatron)), strict=True))
            _append(cell, args.output)
        cells.append(known.get(_key(cell), cell))
    print("\n".join(table(cells, machine.error)))
    if args.picture:
        points = [
            GainAt(float(each["bandwidth"]), int(each["gpus"]), int(each["batch"]), _gain(each, machine.error).value)
            for each in cells
        ]
        title = f"gain of segments, {args.model}, {args.seq_length} tokens, {machine.device.name}"
        plot_gains(points, 100 * machine.error, title, args.output.with_suffix(".png"))
    return 0


def table(cells: Iterable[Cell], error: float) -> list[str]:
    """One line a cell; where Megatron's own schedules are as fast, they are what to use."""
    head = ["GB/s a node", "GPUs", "sequences", "step s", "best", "Megatron s", "Megatron's best", "gain"]
    rows = [
        [*(cell[name] for name in ("bandwidth", "gpus", "batch", *_FOUND)), str(_gain(cell, error))] for cell in cells
    ]
    return list(aligned([head, *rows]))


def _gain(cell: Cell, error: float) -> Gain:
    ours, megatron = (float(cell[name]) if cell[name] else None for name in ("seconds", "megatron_seconds"))
    return Gain(ours, megatron, error)


def _written(plan: Plan | None) -> tuple[str, str]:
    return ("", "-") if plan is None else (f"{plan.prediction.seconds:.4g}", short_name(plan) or "data parallel")


def _with(machine: Machine, bandwidth: float) -> Machine:
    """The machine with so many GB/s of a node to others; one message reaches as large a share of it as before."""
    network = machine.network
    scale = 1e9 * bandwidth / network.bandwidth
    network = replace(network, bandwidth=scale * network.bandwidth, message_bandwidth=scale * network.message_bandwidth)
    return replace(machine, network=network)


def _key(cell: Cell) -> tuple[str, ...]:
    return tuple(cell[name] for name in _KEY)


def _read(path: Path) -> list[Cell]:
    """Raises ValueError for a file that is no map."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if list(lines.fieldnames or ()) != [*_KEY, *_FOUND]:
            raise ValueError(f"--output {path} is there and no map of gains; name another file")
        return list(lines)


def _append(cell: Cell, path: Path) -> None:
    is_new = not path.is_file()
    with path.open("a", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, [*_KEY, *_FOUND])
        if is_new:
            lines.writeheader()
        lines.writerow(cell)
