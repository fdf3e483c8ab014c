"""How soon a model can be trained on a number of tokens, and how time and cost change with the number of GPUs.

    seq1f1b train-time --model llama3-70b --tokens 2e12 --gpus 4096 --machine h100-80gb
    seq1f1b train-time --parameters 1e12 --tokens 2e13 --gpus 16384 --critical-batch-law noise-scale --gpu-hour 2

The batch is as large as a published law of the critical batch size allows; for each number of GPUs up to --gpus, the
configuration that trains soonest is found. All times are predicted; docs/paper_tables.md shows how far off that is.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..planning.costs.blocks import parameters_of_model
from ..planning.costs.machine import machine_names, read_machine
from ..planning.planner import LAWS, Question, Training, device_counts, soonest, way_out
from ..report.text import aligned
from .launch_flags import decided_flags
from .model_flags import PRESETS, gpt_of, model_of, preset_words, read_model, training_flags
from .parsing import PICTURES, Parser, amount, check_output, count, count_up_to, with_values
from .plan import show


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--model", metavar="NAME", help=", ".join(PRESETS))
    sizes.add_argument(
        "--parameters", type=amount, metavar="P", help="a GPT of about so many, 128 times as wide as deep"
    )
    parser.add_argument("--tokens", type=amount, required=True, metavar="D", help="to train on, such as 2e12; required")
    parser.add_argument("--gpus", type=count_up_to(10**6), required=True, metavar="N", help="the most; required")
    parser.add_argument(
        "--machine", default="h100-80gb", help=f"{', '.join(machine_names())}, or your own file; default: h100-80gb"
    )
    parser.add_argument("--seq-length", type=count, default=4096, metavar="TOKENS", help="default: 4096")
    laws = ", ".join(f"{name} ({law.source})" for name, law in LAWS.items())
    parser.add_argument(
        "--critical-batch-law",
        choices=LAWS,
        default="tokens",
        metavar="LAW",
        help=f"{laws}; docs/planning.md has the formulas; default: tokens",
    )
    parser.add_argument("--critical-batch-size", type=amount, metavar="TOKENS", help="your own, in place of the law's")
    parser.add_argument("--gpu-hour", type=amount, metavar="PRICE", help="of one GPU, for a column of costs")
    parser.add_argument("--output", type=Path, help="time and GPU hours: .png, .svg or .pdf (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.output is not None:
        check_output(args.output, *PICTURES)

    words = preset_words(args.model) if args.model else gpt_of(args.parameters).split()
    model = model_of(read_model(words))
    law, parameters = LAWS[args.critical_batch_law], parameters_of_model(model)
    largest = args.critical_batch_size or law.largest(parameters, args.tokens)
    law = replace(law, largest=lambda parameters, tokens: largest)
    # Only the choices that matter most, since many numbers of GPUs are searched.
    question = Question(
        model,
        read_machine(args.machine),
        args.gpus,
        args.seq_length,
        global_batch_size=args.gpus,
        families=("1f1b", "breadth-first"),
        strategies=("balanced",),
        segments=(1, 4, 16),
        chunks=(1, 4),
        micro_batches=(1, 2),
    )
    size = f"{parameters / 1e9:.3g} B parameters, {args.tokens:.3g} tokens"
    print(
        f"{size}, {question.machine.device.name}, sequences of {args.seq_length}\nLargest batch: "
        f"{largest / 1e6:.3g} million tokens ({'as given; tokens by ' * (args.critical_batch_size is not None)}"
        f"{law.source})\n"
    )
    found, counts = [], device_counts(question)
    for number, devices in enumerate(counts):
        show(number, len(counts))
        found += filter(None, [soonest(replace(question, num_devices=devices), args.tokens, law)])
    show(len(counts), len(counts))
    if not found:
        raise way_out(question)
    print(table(found, args.gpu_hour))
    best = min(found, key=lambda each: each.days)
    print(f"\nSoonest: {best.days:.3g} days on {best.devices} GPUs, with\n  ", end="")
    flags = with_values(words) + training_flags(args.seq_length) + decided_flags(best.candidate)
    print(" \\\n  ".join(flags))
    if args.output is not None:
        from ..report.training_time import plot_training_time

        points = {"soonest": [(each.devices, each.days, each.device_hours) for each in found]}
        plot_training_time(points, size, args.output)
        print(f"{args.output} written.")
    return 0


def table(found: Sequence[Training], price: float | None) -> str:
    """A line for each number of devices; with a `price` of a device hour, the cost."""
    head = ["GPUs", "days", "GPU hours", "batch", "steps", "step s", "TP", "CP", "PP", "DP", "C", "k", "EP", "schedule"]
    rows = [head + ["recompute", "GiB"] + ["cost"] * (price is not None)]
    for each in found:
        setup = each.candidate.setup
        days = f"{each.days:.3g}" if each.days < 1000 else f"{each.days:.0f}"
        sizes = (setup.tensor_parallel, setup.context_parallel, setup.pipeline_parallel, setup.data_parallel)
        sizes += (setup.placement.num_chunks, len(setup.segments), setup.expert_parallel)
        row = [str(each.devices), days, f"{each.device_hours:.4g}", str(setup.global_batch_size), f"{each.steps:.0f}"]
        row += [f"{each.step_seconds:.3f}", *map(str, sizes), setup.family if setup.pipeline_parallel > 1 else "-"]
        row += [setup.recompute, f"{each.memory_gib:.0f}"]
        rows.append(row + ([] if price is None else [f"{price * each.device_hours:,.0f}"]))
    return "\n".join(aligned(rows))
