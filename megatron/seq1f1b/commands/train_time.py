"""How soon a model can be trained on a number of tokens, and how time and cost change with the number of GPUs.

    seq1f1b train-time --model llama3-70b --tokens 2e12 --gpus 4096 --machine h100-80gb
    seq1f1b train-time --parameters 1e12 --tokens 2e13 --gpus 16384 --critical-batch-law noise-scale --gpu-hour 2

The batch is as large as a published law of the critical batch size allows; for each number of GPUs up to --gpus, the
configuration that trains soonest is found. All times are predicted; docs/paper_tables.md shows how far off that is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, log2
from types import MappingProxyType
from typing import NamedTuple

from ..planning.costs.blocks import parameters_of_model
from ..planning.costs.machine import read_machine
from ..planning.planner.search import Plan, Search
from ..planning.planner.space import Question
from ..planning.planner.way_out import way_out
from .launch_flags import decided_flags
from .model_flags import PRESETS, gpt_of, model_of, read_model, training_flags
from .parsing import Parser, amount, count, count_up_to, with_values
from .plan import add_machine, in_lines, show
from .plan_text import parallel_sizes, with_heads


class BatchLaw(NamedTuple):
    """`largest(parameters, tokens)` is the largest batch worth its tokens, in tokens; `overhead(x)` is how many more
    tokens, relative to `tokens`, a batch of x times that size needs to reach the same loss."""

    source: str
    largest: Callable[[float, float], float]
    overhead: Callable[[float], float]


def loss(parameters: float, tokens: float) -> float:
    """Nats a token (arXiv 2001.08361, equation 1.5 with table 2)."""
    return float(((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103)


def _olmo(parameters: float, tokens: float) -> float:
    """1024 documents, 2048 from 168e9 tokens on and 4096 from 503e9 on, averaged over the run."""
    return 4096 * 1024 * (tokens + max(0.0, tokens - 168e9) + 2 * max(0.0, tokens - 503e9)) / tokens


LAWS: Mapping[str, BatchLaw] = MappingProxyType(
    {
        "tokens": BatchLaw("arXiv 2410.21676", lambda n, d: 512 * 22.91 * (d / 1e6) ** 0.47, lambda x: 1 + 0.2 * x),
        "noise-scale": BatchLaw("arXiv 1812.06162", lambda n, d: 2e8 / loss(n, d) ** (1 / 0.21), lambda x: 1 + x),
        "olmo": BatchLaw("arXiv 2505.23971", _olmo, lambda x: 1.0),
        # Twice the best batch, which takes 5 % more tokens, as does a half of the best.
        "three-term": BatchLaw(
            "arXiv 2607.01487", lambda n, d: 2 * 0.667 * d**0.566, lambda x: 1 + 0.05 * log2(2 * x) ** 2
        ),
    }
)


class Training(NamedTuple):
    days: float
    steps: float
    plan: Plan


def soonest(
    question: Question, tokens: float, law: BatchLaw, largest: float, shares: Sequence[float] = (1.0, 0.5, 0.25)
) -> Training | None:
    """The fewest days of training (arXiv 2106.02679, section 3); None where nothing fits.

    The batch is one of `shares` of the `largest`, in tokens, since a smaller one needs fewer tokens. It is a power of
    two times an odd number up to 7 of sequences.
    """
    best: Training | None = None
    for share in shares:
        most = max(1, int(share * largest / question.sequence_length))
        power = 1 << max(0, most.bit_length() - 3)
        batch = most // power * power
        in_batch = batch * question.sequence_length
        steps = tokens * law.overhead(in_batch / largest) / in_batch
        below = inf if best is None else best.steps * best.plan.prediction.seconds / steps
        for plan in Search(replace(question, global_batch_size=batch)).best(1, below):
            best = Training(steps * plan.prediction.seconds / 86400, steps, plan)
    return best


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--model", choices=PRESETS, metavar="NAME", help=", ".join(PRESETS))
    about = "a GPT of about this size, 128 times as wide as deep"
    sizes.add_argument("--parameters", type=amount, metavar="P", help=about)
    add("--tokens", type=amount, required=True, metavar="D", help="to train on, such as 2e12; required")
    add("--gpus", type=count_up_to(10**6), required=True, metavar="N", help="the most; required")
    add_machine(parser, "h100-80gb")
    add("--seq-length", type=count, default=4096, metavar="TOKENS", help="default: 4096")
    laws = f"{', '.join(f'{name} ({law.source})' for name, law in LAWS.items())}; docs/planning.md has the formulas; "
    laws += "default: tokens"
    add("--critical-batch-law", choices=LAWS, default="tokens", metavar="LAW", help=laws)
    add("--critical-batch-size", type=amount, metavar="TOKENS", help="your own, in place of the law's")
    add("--gpu-hour", type=amount, metavar="PRICE", help="of one GPU, for a column of costs")
    args = parser.parse_args(argv)
    words = (PRESETS[args.model] if args.model else gpt_of(args.parameters)).split()
    model, machine, law = model_of(read_model(words)), read_machine(args.machine), LAWS[args.critical_batch_law]
    parameters, given = parameters_of_model(model), args.critical_batch_size
    largest = given or law.largest(parameters, args.tokens)
    title = f"{parameters / 1e9:.3g} B parameters, {args.tokens:.3g} tokens, {machine.device.name}"
    source = f"as given; tokens by {law.source}" if given else law.source
    print(f"{title}, sequences of {args.seq_length}\nLargest batch: {largest / 1e6:.3g} million tokens ({source})\n")

    # Only the choices that matter most, since many numbers of GPUs are searched.
    choices = {"families": ("1f1b", "breadth-first"), "segments": (1, 4, 16), "chunks": (1, 4), "micro_batches": (1, 2)}
    question = Question(model, machine, args.gpus, args.seq_length, args.gpus, **choices)
    counts = sorted({min(machine.devices_per_node << doubling, args.gpus) for doubling in range(20)})
    found = []
    for number, devices in enumerate(counts, start=1):
        found += filter(None, [soonest(replace(question, num_devices=devices), args.tokens, law, largest)])
        show(number, len(counts))
    if not found:
        raise way_out(question)
    print("\n".join(with_heads([_row(*each, args.gpu_hour) for each in found])))
    days, _, best = min(found, key=lambda each: each.days)
    flags = with_values(words) + training_flags(args.seq_length) + decided_flags(best.candidate)
    print(f"\nSoonest: {days:.3g} days on {best.candidate.setup.num_devices} GPUs, with{in_lines(flags)}")
    return 0


def _row(days: float, steps: float, plan: Plan, price: float | None) -> Mapping[str, str]:
    """The cost is a column where an hour of a GPU has a price."""
    setup, hours = plan.candidate.setup, 24 * days * plan.candidate.setup.num_devices
    return {
        "GPUs": str(setup.num_devices),
        "days": f"{days:.3g}" if days < 1000 else f"{days:.0f}",
        "GPU hours": f"{hours:.4g}",
        "batch": str(setup.global_batch_size),
        "steps": f"{steps:.0f}",
        "step s": f"{plan.prediction.seconds:.3f}",
        **parallel_sizes(setup),
        "k": str(len(setup.segments)),
        "EP": str(setup.expert_parallel),
        "schedule": setup.family,
        "recompute": setup.recompute,
        "GiB": f"{plan.memory_gib:.0f}",
    } | ({"cost": f"{price * hours:,.0f}"} if price else {})
