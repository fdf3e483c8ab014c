"""Compare where a sequence can be cut: lengths, cost per segment, imbalance, predicted step and bubble.

    seq1f1b plan-split --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
        --seq-length 65536 --sequence-splits 8 --pipeline-model-parallel-size 8 --output splits.png

The cost of a segment is that of its forward and backward on the slowest stage: from FLOPs and a typical device, or
measured in a run (--sequence-split-profile: a trace that --pipeline-trace wrote). Imbalance is the highest cost over
the mean one. Step and bubble are those of the simulated schedule, messages left out. 'terapipe, free' is the dynamic
programme without --sequence-splits.
"""

# Tested in commands/test_schedule_commands.py by test_balance_shows_in_the_predicted_step_and_a_picture.

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import fmean

from ..arguments.flags import given_path
from ..arguments.megatron_run import run_of_settings
from ..arguments.sequence_partition import SequencePartition
from ..costs.run_costs import RunCosts
from ..costs.simulator import check_size
from ..partition import STRATEGIES, even, segment_times
from ..report.plan_figures import CutRow, plot_splits
from ..report.text import aligned
from ..schedule import FAMILIES, Placement, Shape, build, simulate
from .model_flags import add_model_flags, settings_of
from .parsing import PICTURES, Parser, count, output_path, sequence_length
from .progress import show

# Simulating this many takes some seconds for each strategy.
MOST_ACTIONS = 300_000


def make_parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add_model_flags(parser, num_layers=32, hidden_size=4096, num_attention_heads=32, vocab_size=32768)
    add("--seq-length", type=sequence_length, default=65536, help="default: 65536")
    add("--sequence-splits", type=count, default=8, metavar="K", help="segments; default: 8")
    add("--pipeline-model-parallel-size", type=count, default=8, metavar="P", help="ranks; default: 8")
    chunks = "model chunks on each rank; default: 1"
    add("--num-virtual-stages-per-pipeline-rank", type=count, default=1, metavar="C", help=chunks)
    add("--tensor-model-parallel-size", type=count, default=1, metavar="T")
    add("--sequence-parallel", action="store_true", help="segments are then multiples of T")
    add("--num-microbatches", type=count, default=8, metavar="M", help="default: 8")
    add("--pipeline-schedule", choices=sorted(FAMILIES), default="1f1b", help="default: 1f1b")
    add("--recompute", action="store_true", help="full recomputation of the activations of layers")
    add("--device", choices=("a100", "cpu"), default="a100", help="whose throughput; default: a100")
    add("--sequence-split-profile", type=given_path, metavar="FILE.json", help="measured costs")
    add("--sequence-split-file", type=given_path, metavar="FILE", help="lengths of your own, to be compared")
    picture = "a picture: .png, .svg or .pdf (needs matplotlib)"
    add("--output", type=output_path(*PICTURES), metavar="FILE", help=picture)
    # Flags of training that costs depend on.
    parser.set_defaults(recompute_keeps_attention=False, keep_logits=False)
    parser.set_defaults(offload_activations=0.0, offload_layers_leaving=0)
    return parser


def run_costs(args: argparse.Namespace, shape: Shape) -> RunCosts:
    """The costs of the run of the flags, as training has them. Raises ValueError for sizes that do not go together."""
    heads = args.num_attention_heads
    tensor = args.tensor_model_parallel_size
    if args.num_layers < shape.num_stages:
        raise ValueError(f"--num-layers {args.num_layers} leaves some of the {shape.num_stages} stages without a layer")
    if heads % tensor:
        raise ValueError(f"--num-attention-heads {heads} is no multiple of --tensor-model-parallel-size {tensor}")
    check_size(shape, MOST_ACTIONS)
    settings = settings_of(args) | {"recompute_granularity": "full" if args.recompute else None}
    settings["virtual_pipeline_model_parallel_size"] = args.num_virtual_stages_per_pipeline_rank
    run = run_of_settings(settings, args.num_microbatches)
    return RunCosts(args, replace(run, layers_per_stage=even(args.num_layers, shape.num_stages)))


def partitions(args: argparse.Namespace, costs: RunCosts) -> Iterator[tuple[str, SequencePartition]]:
    """All ways to cut the sequence, by name; a file of lengths first, since it may be wrong."""
    if file := args.sequence_split_file:
        yield file.name, SequencePartition(costs.run, costs, "even", None, file)
    for strategy in STRATEGIES:
        if strategy != "profile":  # with measured costs, `balanced` is this
            name = "profile" if strategy == "balanced" and costs.is_measured else strategy
            yield name, SequencePartition(costs.run, costs, strategy, args.sequence_splits, None)
    if not costs.is_measured:  # a trace has no times of segments shorter than its own
        yield "terapipe, free", SequencePartition(costs.run, costs, "terapipe", None, None)


def table(cuts: list[CutRow]) -> str:
    """One line per strategy; lengths and costs of many segments are cut short."""

    def short(values: Iterable[float], form: str) -> str:
        words = [format(value, form) for value in values]
        if len(words) > 8:
            words = [*words[:4], "...", *words[-3:]]
        return " ".join(words)

    rows = [("strategy", "k", "max/mean", "step s", "bubble %", "lengths in tokens")]
    costs = [("strategy", "cost of each segment on the slowest stage, ms")]
    for cut in cuts:
        rows.append(
            (
                cut.name,
                str(len(cut.lengths)),
                f"{cut.imbalance:.3f}",
                f"{cut.step.makespan:.3f}",
                f"{100 * cut.step.bubble_ratio:.1f}",
                short(cut.lengths, "d"),
            )
        )
        costs.append((cut.name, short((1e3 * cost for cost in cut.costs), ".1f")))
    return "\n".join([*aligned(rows, "lrrrrl"), "", *aligned(costs, "ll")])


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    ranks = args.pipeline_model_parallel_size
    microbatches = args.num_microbatches
    shape = Shape(Placement(ranks, args.num_virtual_stages_per_pipeline_rank), microbatches, args.sequence_splits)
    costs = run_costs(args, shape)
    if costs.is_measured:
        errors = costs.measured.errors
        off = f"{100 * fmean(errors):.1f} % on average, {100 * max(errors):.1f} % at most"
        print(f"Measured in a run; the fit is off by {off}.\n")
    cuts = []
    ways = list(partitions(args, costs))
    for number, (name, partition) in enumerate(ways):
        show(number, len(ways))
        try:
            lengths = partition.cut(args.seq_length)
        except ValueError as error:
            if partition.file is not None or name == "even":  # the others cannot cut it, either
                raise
            print(f"{name}: {str(error).replace('--sequence-split-strategy ', '')}.", file=sys.stderr)
            continue
        schedule = build(args.pipeline_schedule, replace(shape, num_segments=len(lengths)))
        step = simulate(schedule, costs.of_actions(lengths))
        cuts.append(CutRow(name, lengths, tuple(segment_times(lengths, costs.time())), step))
    show(len(ways), len(ways))
    print(table(cuts))
    if args.output is not None:
        sizes = f"{args.num_layers} layers of {args.hidden_size}, {args.seq_length} tokens"
        plot_splits(cuts, f"{sizes}, {ranks} ranks, {microbatches} micro-batches", args.output)
        print(f"\n{args.output} written.")
