"""How soon a model can be trained on a number of tokens, and how time and GPU hours change with the number of GPUs.

    seq1f1b train-time --model llama3-70b --tokens 2e12 --gpus 4096 --machine h100-80gb

The batch is as large as a published law of the critical batch size allows; for each number of GPUs up to --gpus, the
configuration that trains soonest is found. All times are predicted; docs/paper_tables.md shows how far off that is.
"""

# Tested in commands/test_plan.py.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, log2
from types import MappingProxyType
from typing import NamedTuple

from ..costs.blocks import parameters_of_model
from ..costs.machine import read_machine
from ..costs.training_setup import ALL_BUT_ATTENTION, FULL
from ..planner.search import Plan, Search
from ..planner.space import Question
from ..planner.way_out import way_out
from .launch_flags import decided_flags
from .model_flags import PRESETS, preset, preset_words
from .parsing import MOST_SEQUENCES, Parser, amount, count_up_to, sequence_length, with_values
from .plan_text import in_lines, row, with_header
from .progress import show

_SECONDS_OF_A_DAY = 86400
# The columns of a plan that are shown.
_OF_PLAN = ("step s", "TP", "CP", "PP", "DP", "C", "k", "schedule", "recompute", "GiB")


class BatchLaw(NamedTuple):
    """`largest(parameters, tokens)` is the largest batch worth its tokens, in tokens; one of x times that size takes
    `overhead(x)` times the tokens to reach the same loss."""

    source: str
    largest: Callable[[float, float], float]
    overhead: Callable[[float], float]


def loss(parameters: float, tokens: float) -> float:
    """Nats a token (arXiv 2001.08361, equation 1.5 with table 2)."""
    return float(((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103)


def _olmo_batch(parameters: float, tokens: float) -> float:
    """1024 documents of 4096 tokens, 2048 from 168e9 tokens on and 4096 from 503e9 on, averaged over the run."""
    doubled = max(0.0, tokens - 168e9)
    doubled_again = max(0.0, tokens - 503e9)
    return 2**22 * (tokens + doubled + 2 * doubled_again) / tokens


LAWS: Mapping[str, BatchLaw] = MappingProxyType(
    {
        "tokens": BatchLaw(
            source="arXiv 2410.21676",
            largest=lambda parameters, tokens: 512 * 22.91 * (tokens / 1e6) ** 0.47,
            overhead=lambda share: 1 + 0.2 * share,
        ),
        "noise-scale": BatchLaw(
            source="arXiv 1812.06162",
            largest=lambda parameters, tokens: 2e8 / loss(parameters, tokens) ** (1 / 0.21),
            overhead=lambda share: 1 + share,
        ),
        "olmo": BatchLaw(source="arXiv 2505.23971", largest=_olmo_batch, overhead=lambda share: 1.0),
        # Twice the best batch, which takes 5 % more tokens, as does a half of the best.
        "three-term": BatchLaw(
            source="arXiv 2607.01487",
            largest=lambda parameters, tokens: 1.334 * tokens**0.566,
            overhead=lambda share: 1 + log2(2 * share) ** 2 / 20,
        ),
    }
)


class Training(NamedTuple):
    """How a model is trained on its tokens: the days that it takes, and the plan of its steps."""

    days: float
    plan: Plan


def soonest(
    question: Question, tokens: float, law: BatchLaw, largest: float, shares: Sequence[float] = (1.0, 0.5, 0.25)
) -> Training | None:
    """The training that takes the fewest days (arXiv 2106.02679, section 3); None where nothing fits.

    The `largest` batch is in tokens. Its `shares` are tried, since a smaller batch needs fewer tokens in all; each is
    rounded down to 4 to 7 times a power of two in sequences; below 8 sequences nothing is rounded.
    """
    best: Training | None = None
    for share in shares:
        most = max(1, int(share * largest / question.sequence_length))
        power = 1 << max(0, most.bit_length() - 3)
        batch = most // power * power
        tokens_in_batch = batch * question.sequence_length
        num_steps = tokens * law.overhead(tokens_in_batch / largest) / tokens_in_batch
        days_per_second = num_steps / _SECONDS_OF_A_DAY  # of training, for a second of a step
        below = inf if best is None else best.days / days_per_second
        for plan in Search(replace(question, global_batch_size=batch)).best(1, below):
            best = Training(days_per_second * plan.seconds, plan)
    return best


def make_parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--model", choices=PRESETS, required=True, metavar="NAME", help=", ".join(PRESETS))
    add("--tokens", type=amount, required=True, metavar="D", help="to train on, such as 2e12; required")
    add("--gpus", type=count_up_to(2**16), required=True, metavar="N", help="the most; required")
    parser.add_machine("h100-80gb")
    add("--seq-length", type=sequence_length, default=4096, metavar="TOKENS", help="default: 4096")
    laws = f"{', '.join(LAWS)}; docs/planning.md has the formulas; default: tokens"
    add("--critical-batch-law", choices=LAWS, default="tokens", metavar="LAW", help=laws)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    model = preset(args.model)
    machine = read_machine(args.machine)
    law = LAWS[args.critical_batch_law]
    parameters = parameters_of_model(model)
    largest = law.largest(parameters, args.tokens)
    if largest < args.seq_length:
        raise ValueError(
            f"--tokens {args.tokens:g} allows a step of {largest:,.0f} tokens, less than one sequence of --seq-length "
            f"{args.seq_length}; give more tokens, or shorter sequences"
        )
    if largest / args.seq_length > MOST_SEQUENCES:
        raise ValueError(
            f"--tokens {args.tokens:g} allows a step of {largest / args.seq_length:,.0f} sequences of --seq-length "
            f"{args.seq_length}; the most are {MOST_SEQUENCES:,}: give fewer tokens, or longer sequences"
        )
    print(f"{parameters / 1e9:.3g} B parameters; largest batch: {largest / 1e6:.3g} million tokens ({law.source})\n")
    question = Question(
        model=model,
        machine=machine,
        num_devices=args.gpus,
        sequence_length=args.seq_length,
        global_batch_size=args.gpus,
        # Only the choices that matter most, since many numbers of GPUs are searched.
        families=("1f1b", "breadth-first"),
        segments=(1, 4, 16),
        chunks=(1, 4),
        micro_batches=(1, 2),
        recomputes=("none", "layernorm mlp", "layernorm mlp moe", ALL_BUT_ATTENTION, FULL),
    )
    trainings = []
    counts = sorted({min(machine.devices_per_node << doubling, args.gpus) for doubling in range(20)})
    for number, devices in enumerate(counts, start=1):
        training = soonest(replace(question, num_devices=devices), args.tokens, law, largest)
        if training is not None:
            trainings.append(training)
        show(number, len(counts))
    if not trainings:
        raise way_out(question)
    print("\n".join(with_header([columns_of(training) for training in trainings])))
    best = min(trainings, key=lambda training: training.days)
    candidate = best.plan.candidate
    flags = with_values(preset_words(args.model, args.seq_length)) + decided_flags(candidate)
    print(f"\nSoonest: {best.days:.2f} days on {candidate.setup.num_devices} GPUs, with{in_lines(flags)}")


def columns_of(training: Training) -> dict[str, str]:
    """The columns of the table for a training."""
    plan = training.plan
    setup = plan.candidate.setup
    columns = {
        "GPUs": f"{setup.num_devices}",
        "days": f"{training.days:.2f}",
        "GPU hours": f"{24 * training.days * setup.num_devices:.0f}",
        "batch": f"{setup.global_batch_size}",
        "steps": f"{_SECONDS_OF_A_DAY * training.days / plan.seconds:.0f}",
    }
    of_plan = row(plan)
    for name in _OF_PLAN:
        columns[name] = of_plan[name]
    return columns
