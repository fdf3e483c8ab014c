"""How soon a model can be trained on a number of tokens, and how time and cost change with the number of GPUs.

    seq1f1b train-time --model llama3-70b --tokens 2e12 --gpus 4096 --machine h100-80gb
    seq1f1b train-time --parameters 1e12 --tokens 2e13 --gpus 16384 --critical-batch-law noise-scale --gpu-hour 2

The batch is as large as a published law of the critical batch size allows; for each number of GPUs up to --gpus, the
configuration that trains soonest is found. All times are predicted; docs/paper_tables.md shows how far off that is.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..planning.costs import ModelShape
from ..planning.costs.machine import machine_names, read_machine
from ..planning.costs.model_shape import parameters_of_model
from ..planning.planner import (
    LAWS,
    PRESETS,
    Question,
    Training,
    batch_law,
    device_counts,
    lean,
    preset,
    soonest,
    way_out,
)
from ..planning.planner.presets import gpt_of
from ..report.text import aligned
from .candidate_flags import decided_flags, model_flags
from .parsing import PICTURES, Parser, amount, check_output, count
from .plan import show


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--model", metavar="NAME", help=", ".join(PRESETS))
    sizes.add_argument(
        "--parameters", type=amount, metavar="P", help="a GPT of about so many, 128 times as wide as deep"
    )
    parser.add_argument("--tokens", type=amount, required=True, metavar="D", help="to train on, such as 2e12")
    parser.add_argument("--gpus", type=count, required=True, metavar="N", help="the most")
    parser.add_argument(
        "--machine", default="h100-80gb", help=f"{', '.join(machine_names())}, or your own file; default: h100-80gb"
    )
    parser.add_argument("--seq-length", type=count, default=4096, metavar="TOKENS", help="default: 4096")
    laws = ", ".join(f"{name} ({law.source.partition(':')[0]})" for name, law in LAWS.items())
    parser.add_argument(
        "--critical-batch-law", default="tokens", metavar="LAW", help=f"{laws}; docs/planning.md has the formulas"
    )
    parser.add_argument("--critical-batch-size", type=amount, metavar="TOKENS", help="your own, in place of the law's")
    parser.add_argument("--gpu-hour", type=amount, metavar="PRICE", help="of one GPU, for a column of costs")
    parser.add_argument("--output", type=Path, help="time and GPU hours: .png, .svg or .pdf (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.output is not None:
        check_output(args.output, *PICTURES)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    model: ModelShape = preset(args.model) if args.model else gpt_of(args.parameters)
    law, machine = batch_law(args.critical_batch_law), read_machine(args.machine)
    parameters = parameters_of_model(model)
    largest = args.critical_batch_size or law.largest(parameters, args.tokens)
    if args.critical_batch_size is not None:
        law = law.bounded_by(args.critical_batch_size)
    question = lean(Question(model, machine, args.gpus, args.seq_length, 1))
    print(
        f"{parameters / 1e9:.3g} B parameters, {args.tokens:.3g} tokens, {machine.device.name}, sequences of "
        f"{args.seq_length}\nLargest batch: {largest / 1e6:.3g} million tokens ({law.source})\n"
    )
    found = [each for each in soonest(question, args.tokens, law, device_counts(question), progress=show) if each]
    if not found:
        raise way_out(Question(model, machine, args.gpus, args.seq_length, args.gpus))
    print(table(found, args.gpu_hour))
    best = min(found, key=lambda each: each.days)
    print(f"\nSoonest: {best.days:.3g} days on {best.devices} GPUs, with\n  ", end="")
    print(" \\\n  ".join([*model_flags(model, args.seq_length), *decided_flags(best.candidate)]))
    if args.output is not None:
        from ..report.training_time import plot_training_time

        points = {"soonest": [(each.devices, each.days, each.device_hours) for each in found]}
        plot_training_time(points, f"{parameters / 1e9:.3g} B parameters, {args.tokens:.3g} tokens", args.output)
        print(f"{args.output} written.")
    return 0


def table(found: Sequence[Training], price: float | None = None) -> str:
    """A line for each number of devices."""
    head = ["GPUs", "days", "GPU hours", "batch", "steps", "step s", "TP", "CP", "PP", "DP", "C", "k", "EP", "schedule"]
    head += ["recompute", "GiB"] + (["cost"] if price else [])
    rows = [_row(each) + ([f"{price * each.device_hours:,.0f}"] if price else []) for each in found]
    return "\n".join(aligned([head, *rows]))


def _row(each: Training) -> list[str]:
    setup = each.candidate.setup
    sizes = (setup.tensor_parallel, setup.context_parallel, setup.pipeline_parallel, setup.data_parallel)
    sizes += (setup.placement.num_chunks, len(setup.segments), setup.expert_parallel)
    return [
        str(each.devices),
        f"{each.days:.3g}" if each.days < 1000 else f"{each.days:.0f}",
        f"{each.device_hours:.4g}",
        str(setup.global_batch_size),
        f"{each.steps:.0f}",
        f"{each.step_seconds:.3f}",
        *map(str, sizes),
        setup.family if setup.pipeline_parallel > 1 else "-",
        setup.recompute,
        f"{each.memory_gib:.0f}",
    ]
