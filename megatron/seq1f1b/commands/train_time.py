"""How soon a model can be trained on a number of tokens, and how time and cost change with the number of GPUs.

    seq1f1b train-time --model llama3-70b --tokens 2e12 --gpus 4096 --machine h100-80gb
    seq1f1b train-time --parameters 1e12 --tokens 2e13 --gpus 16384 --critical-batch-law noise-scale --gpu-hour 2

The batch is as large as a published law of the critical batch size allows; for each number of GPUs up to --gpus, the
configuration that trains soonest is found. All times are predicted; docs/paper_tables.md shows how far off that is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..planning.costs.blocks import parameters_of_model
from ..planning.costs.machine import read_machine
from ..planning.planner.space import Question
from ..planning.planner.time_to_train import LAWS, Training, soonest
from ..planning.planner.way_out import way_out
from .launch_flags import decided_flags
from .model_flags import PRESETS, gpt_of, model_of, read_model, training_flags
from .parsing import Parser, amount, count, count_up_to, with_values
from .plan import add_machine, in_lines, show
from .plan_text import parallel_sizes, with_heads


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--model", choices=PRESETS, metavar="NAME", help=", ".join(PRESETS))
    of_size = "a GPT of about this size, 128 times as wide as deep"
    sizes.add_argument("--parameters", type=amount, metavar="P", help=of_size)
    parser.add_argument("--tokens", type=amount, required=True, metavar="D", help="to train on, such as 2e12; required")
    parser.add_argument("--gpus", type=count_up_to(10**6), required=True, metavar="N", help="the most; required")
    add_machine(parser, "h100-80gb")
    parser.add_argument("--seq-length", type=count, default=4096, metavar="TOKENS", help="default: 4096")
    laws = ", ".join(f"{name} ({law.source})" for name, law in LAWS.items())
    laws += "; docs/planning.md has the formulas; default: tokens"
    parser.add_argument("--critical-batch-law", choices=LAWS, default="tokens", metavar="LAW", help=laws)
    parser.add_argument("--critical-batch-size", type=amount, metavar="TOKENS", help="your own, in place of the law's")
    parser.add_argument("--gpu-hour", type=amount, metavar="PRICE", help="of one GPU, for a column of costs")
    args = parser.parse_args(argv)
    words = (PRESETS[args.model] if args.model else gpt_of(args.parameters)).split()
    model, machine, law = model_of(read_model(words)), read_machine(args.machine), LAWS[args.critical_batch_law]
    parameters = parameters_of_model(model)
    largest = args.critical_batch_size or law.largest(parameters, args.tokens)
    law = law._replace(largest=lambda parameters, tokens: largest)
    title = f"{parameters / 1e9:.3g} B parameters, {args.tokens:.3g} tokens, {machine.device.name}"
    source = f"as given; tokens by {law.source}" if args.critical_batch_size else law.source
    print(f"{title}, sequences of {args.seq_length}\nLargest batch: {largest / 1e6:.3g} million tokens ({source})\n")

    # Only the choices that matter most, since many numbers of GPUs are searched.
    choices = {"families": ("1f1b", "breadth-first"), "segments": (1, 4, 16), "chunks": (1, 4), "micro_batches": (1, 2)}
    question = Question(model, machine, args.gpus, args.seq_length, args.gpus, **choices)
    counts = sorted({min(machine.devices_per_node << doubling, args.gpus) for doubling in range(20)})
    found = []
    for number, devices in enumerate(counts, start=1):
        found += filter(None, [soonest(replace(question, num_devices=devices), args.tokens, law)])
        show(number, len(counts))
    if not found:
        raise way_out(question)
    print("\n".join(with_heads([_row(each, args.gpu_hour) for each in found])))
    best = min(found, key=lambda each: each.days)
    flags = with_values(words) + training_flags(args.seq_length) + decided_flags(best.candidate)
    print(f"\nSoonest: {best.days:.3g} days on {best.candidate.setup.num_devices} GPUs, with{in_lines(flags)}")
    return 0


def _row(training: Training, price: float | None) -> Mapping[str, str]:
    """The cost is a column where an hour of a GPU has a price."""
    setup, days, hours = training.candidate.setup, training.days, training.device_hours
    return {
        "GPUs": str(setup.num_devices),
        "days": f"{days:.3g}" if days < 1000 else f"{days:.0f}",
        "GPU hours": f"{hours:.4g}",
        "batch": str(setup.global_batch_size),
        "steps": f"{training.steps:.0f}",
        "step s": f"{training.step_seconds:.3f}",
        **parallel_sizes(setup),
        "k": str(len(setup.segments)),
        "EP": str(setup.expert_parallel),
        "schedule": setup.family,
        "recompute": setup.recompute,
        "GiB": f"{training.memory_gib:.0f}",
    } | ({"cost": f"{price * hours:,.0f}"} if price else {})
