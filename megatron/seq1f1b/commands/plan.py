"""Find the fastest configuration of Megatron that fits a cluster.

    seq1f1b plan --model 13b --gpus 64 --machine a100-80gb --seq-length 65536 --global-batch-size 16
    seq1f1b plan --gpus 64 --machine a100-80gb <the flags of your launch script>
    seq1f1b plan --lengths lengths.csv --model llama3-8b --gpus 64 --global-batch-size 512

It chooses parallel sizes, model chunks, the layers of each stage, segments and where they are cut, the schedule, the
micro-batch, recomputation and the share of the activations that waits in the memory of the host. The choices of a
launch script are predicted too, for comparison; its other flags come back unchanged, so that the result can be pasted
in its place. docs/planning.md describes the machines, and docs/paper_tables.md shows how far predictions are off.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from math import ceil
from pathlib import Path

from ..arguments.flags import add_arguments, given_path
from ..arguments.unsupported import OurFeature
from ..costs.machine import OUTSIDE_GIB, read_machine
from ..files.lengths import read_histogram
from ..files.reading import check_program
from ..files.typed import named_by
from ..planner.gain import Gain
from ..planner.search import Plan
from ..planner.space import Question
from ..process.near_names import did_you_mean
from . import plan_text
from .launch_flags import decided_flags, launch_parser, megatron_values, read_launch
from .launch_rules import LaunchRules
from .model_flags import PRESETS, model_of, preset_words, without_heads
from .parsing import (
    MOST_SEQUENCES,
    PICTURES,
    Parser,
    amount,
    amount_or_0,
    count_up_to,
    name_of,
    output_path,
    sequence_length,
)
from .plan_answer import Answer
from .plan_json import write_answer
from .plan_kinds import PlanKind, PlansInUnits, PlansOfSequences
from .progress import Progress

_MOST_IN_UNITS = 4096
_ROUND = 256  # tokens: parallel sizes have to divide --seq-length
# The flags that a rehearsal needs beside those of a plan.
_TRAINING = "--mock-data --tokenizer-type NullTokenizer --train-iters 20 --lr 6e-5 --eval-iters 0"


def make_parser() -> Parser:
    parser = Parser(__doc__, usage="%(prog)s --gpus N [--model NAME] [flags of a launch ...]")
    add = parser.add_argument
    add("--model", choices=PRESETS, metavar="NAME", help=f"{', '.join(PRESETS)}; instead of --num-layers and its kin")
    size = os.environ.get("WORLD_SIZE")
    add("--gpus", type=count_up_to(10**6), default=size, metavar="N", help="default: WORLD_SIZE")
    add("--seq-length", type=sequence_length, metavar="TOKENS", help="of a sequence; required without --lengths")
    lengths = "plan for unequal lengths, cut off at --seq-length: a CSV of 'tokens,sequences', or the .idx of a corpus"
    add("--lengths", type=given_path, metavar="FILE", help=lengths)
    add("--global-batch-size", type=count_up_to(MOST_SEQUENCES), metavar="N", help="in sequences; required")
    parser.add_machine("a100-80gb")
    add("--device-memory", type=amount, metavar="GIB", help="default: what a device of the machine has")
    host = "of the host, for activations of each device; 0: none moves there; default: what the machine file has"
    add("--host-memory", type=amount_or_0, metavar="GIB", help=host)
    best = "configurations to show, within 5 %% of the best; default: 5"
    add("--best", type=count_up_to(1000), default=5, metavar="N", help=best)
    add("--explain", action="store_true", help="where the time goes, and what the second best lacks")
    picture = "throughput against memory: .png, .svg or .pdf (needs matplotlib)"
    add("--output", type=output_path(*PICTURES), metavar="FILE", help=picture)
    add("--json", type=output_path(".json"), metavar="FILE.json", help="the same answer for programs")
    parser.add_workers("share a search of more than some seconds", most=8)
    what = "rehearse what is advised on this machine (--dry-run) with your training script; default: pretrain_gpt.py"
    add("--rehearse", type=given_path, nargs="?", const=Path("pretrain_gpt.py"), metavar="FILE.py", help=what)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Our own flags, with those of the launch as `launch`."""
    parser = make_parser()
    args, words = parser.parse_known_args(argv)
    _refuse_misspelt(parser, words)
    parser.refuse_stray(argv, launch_parser(), _training_parser(), most_values=megatron_values())
    _require_all(parser, args, words)
    if args.lengths is not None:
        _check_for_units(parser, args)
        args.histogram = read_histogram(args.lengths)
        args.seq_length = args.seq_length or _ROUND * ceil(max(args.histogram) / _ROUND)
    if args.rehearse is not None:
        if not args.rehearse.is_file():
            parser.error(f"--rehearse {args.rehearse}: there is no such script; name your own")
        with named_by("--rehearse"):
            check_program(args.rehearse)
    model = preset_words(args.model, args.seq_length) if args.model else []
    planned = model if args.lengths is None else without_heads(model)
    args.launch = read_launch(words, planned)
    args.leaves_heads_out = planned != model
    if args.model and args.launch.of_model:
        parser.error(f"--model {args.model} has its own {args.launch.of_model[0]}; drop one of them")
    return args


def _training_parser() -> argparse.ArgumentParser:
    """The flags of this package for training."""
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))


def _refuse_misspelt(parser: Parser, words: Sequence[str]) -> None:
    """End the program at a word that is nearly one of our flags."""
    for word in words:
        if not word.startswith("--"):
            continue
        name = word.partition("=")[0]
        # Flags of Megatron are no misspelt ones of ours: --eval-global-batch-size is longer.
        own = [flag for flag in parser.flags if abs(len(flag) - len(name)) <= 2 or flag.startswith(name)]
        near = get_close_matches(name, own, n=1, cutoff=0.83)
        if near:
            parser.error(f"{name} is unknown; did you mean {near[0]}?")


def _require_all(parser: Parser, args: argparse.Namespace, words: Sequence[str]) -> None:
    """End the program if flags are missing without which nothing can be planned."""
    missing = []
    # A pattern has a symbol for each layer, so Megatron needs no number beside it.
    counts_layers = any(word.startswith(("--num-layers", "--hybrid-layer-pattern")) for word in words)
    if args.model is None and not counts_layers:
        missing.append("--model (or the sizes of one, --num-layers and its kin)")
    if args.gpus is None:
        missing.append("--gpus")
    if args.seq_length is None and args.lengths is None:
        missing.append("--seq-length")
    if args.global_batch_size is None:
        missing.append("--global-batch-size")
    if missing:
        *first, last = missing
        names = f"{', '.join(first)} and {last}" if first else last
        parser.error(f"{names} must be given")


def _check_for_units(parser: Parser, args: argparse.Namespace) -> None:
    """End the program at flags that do not go with --lengths."""
    if args.explain or args.output is not None or args.rehearse is not None:
        parser.error("--explain, --output and --rehearse are for sequences of one length; drop them, or --lengths")
    if args.global_batch_size > _MOST_IN_UNITS:
        most = f"steps of at most {_MOST_IN_UNITS} sequences are predicted with --lengths; plan for that many"
        parser.error(f"--global-batch-size {args.global_batch_size}: {most}, the flags hold for more")


def question(args: argparse.Namespace, rules: LaunchRules) -> Question:
    """Raises ValueError for what is missing, unknown or does not go together."""
    machine = read_machine(args.machine)
    if args.host_memory and not machine.device.host_bandwidth:
        raise ValueError(f"--host-memory is for machines with host_bandwidth in [device], which {args.machine} lacks")
    return Question(
        model=model_of(args.launch),
        machine=machine,
        num_devices=args.gpus,
        sequence_length=args.seq_length,
        global_batch_size=args.global_batch_size,
        memory_gib=None if args.device_memory is None else max(0.0, args.device_memory - OUTSIDE_GIB),
        host_gib=machine.device.host_memory_gib if args.host_memory is None else args.host_memory,
        partitions_state=args.launch.partition_state or None,
        dispatches_once=args.launch.moe_token_dispatcher_type == "flex",
        accepts=rules.accept,
        accepts_of_megatron=rules.accept_of_megatron,
    )


def all_flags(launch: argparse.Namespace, best: Plan, by_megatron: bool = False) -> list[str]:
    """The flags that are kept, and those of the plan; the last wins where a name repeats."""
    flags = [*launch.passed_through, *decided_flags(best.candidate, by_megatron)]
    return list({name_of(flag): flag for flag in flags}.values())


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rules = launch_rules(args.launch, in_units=args.lengths is not None)
    asked = question(args, rules)
    progress = Progress()
    kind = plan_kind(args, asked, progress)
    answer = answer_of(kind, rules, args)
    progress.end()

    def flags_of(plan: Plan) -> list[str]:
        return all_flags(args.launch, plan, by_megatron=plan is answer.megatron)

    print_plans(kind, answer)
    print(plan_text.flags_of_both(answer.advised, answer.other, answer.megatron, flags_of))
    print_notes(kind, rules, args, flags_of(answer.advised))
    if args.explain:
        print(plan_text.explained(answer.ours))
    if args.json is not None:
        write_answer(args.json, args, answer, flags_of)
        print(f"{args.json} written.")
    for picture in kind.pictures(answer):
        print(f"{picture} written.")
    if args.rehearse is None:
        return 0
    if answer.rehearsable is not answer.advised:
        print("Rehearsing this package's plan: Megatron's, with FSDP or a ring of context parallelism, needs GPUs.")
    return rehearse(args, asked, flags_of(answer.rehearsable))


def launch_rules(launch: argparse.Namespace, in_units: bool) -> LaunchRules:
    """The limits of plans by the flags of the launch."""
    always: set[OurFeature] = set()
    if launch.partition_state:
        always.add(OurFeature.PARTITIONED_STATE)
    if in_units:
        always |= {OurFeature.SEGMENTS, OurFeature.UNITS}
    return LaunchRules(launch.passed_through, always)


def plan_kind(args: argparse.Namespace, asked: Question, progress: Progress) -> PlanKind:
    if args.lengths is not None:
        return PlansInUnits(asked, args.histogram, args.workers)
    return PlansOfSequences(asked, progress, args.output, args.workers)


def answer_of(kind: PlanKind, rules: LaunchRules, args: argparse.Namespace) -> Answer:
    """The best plans of both sides, and the launch as given. Raises ValueError, with a way out, if nothing fits."""
    given = kind.as_given(args.launch)
    megatron = kind.search.megatron_baseline()
    ours = kind.best(args.best, megatron)
    if not ours:
        raise kind.nothing_fits([*rules.left_out()])
    asked = kind.question
    gain = Gain(
        ours=ours[0].tokens_per_second,
        megatron=None if megatron is None else megatron.tokens_per_second,
        error=asked.machine.error_of(asked.model),
    )
    least_seconds = min(ours[0].seconds, kind.least_seconds)
    return Answer(ours=ours, least_seconds=least_seconds, megatron=megatron, given=given, gain=gain)


def print_plans(kind: PlanKind, answer: Answer) -> None:
    """Print the table of plans, the verdict, and the memory of what is advised."""
    asked = kind.question
    print(kind.title())
    print("", *plan_text.ranking(answer.ours, answer.megatron, answer.given, kind.row), sep="\n")
    if answer.given is not None:
        print(plan_text.of_launch(answer.given, answer.advised, asked.memory_limit))
    print("", *kind.verdict(answer), sep="\n")
    print(plan_text.memory_by_stage(answer.advised, asked))


def print_notes(kind: PlanKind, rules: LaunchRules, args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Print what was left out of the search, and what of the launch changes no prediction."""
    launch = args.launch
    for sentence in rules.left_out():
        print(sentence)
    for name in map(name_of, launch.unread):
        if name in ("--fp8-format", "--fp4-format"):
            print(f"{name} is not modelled: times and memory are those of 16 bit.")
    unread = [name_of(flag) for flag in launch.unread if flag in flags]
    if unread:
        known = {*megatron_values(), *_training_parser()._option_string_actions}
        for name in unread:
            if name not in known:
                near = did_you_mean(name, known)
                print(f"{name} is no flag of Megatron: {near}" if near else f"{name} is no flag of Megatron.")
        print(f"These flags come back as given and change no prediction: {', '.join(unread)}.")
    for sentence in kind.notes(flags):
        print(sentence)
    if args.leaves_heads_out:
        print(
            f"The heads of {args.model} that predict further tokens are left out (--mtp-num-layers): units refuse them."
        )


def rehearse(args: argparse.Namespace, asked: Question, flags: Sequence[str]) -> int:
    """Run the training script with --dry-run; returns its exit code."""
    sys.stdout.flush()
    command = [sys.executable, str(args.rehearse)]
    if args.model:
        command += _TRAINING.split()
    for flag in flags:
        command += shlex.split(flag)
    memory = asked.memory_limit + OUTSIDE_GIB  # the rehearsal itself takes off what lies outside the allocator
    command += ["--dry-run", "--device-memory", str(memory)]
    return subprocess.run(command, env={**os.environ, "WORLD_SIZE": str(asked.num_devices)}).returncode
