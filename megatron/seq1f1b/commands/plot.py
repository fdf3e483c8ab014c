"""Draw the timeline of a schedule, or write it as JSON, CSV or a trace for Perfetto.

    seq1f1b plot --pipeline-schedule 1f1b --pipeline-model-parallel-size 8 \\
        --num-microbatches 8 --sequence-splits 4 --output seq1f1b.png

The ending of --output determines what is written: .png, .svg, .pdf (a figure), .trace.json (a
trace that ui.perfetto.dev opens), .json (the timeline), .csv (the schedule, to be changed by hand
and given to --pipeline-schedule-file). --timeline draws measured timelines.

Names from papers: interleaved 1F1B is 1f1b with several chunks, Seq1F1B 1f1b with --sequence-splits,
TeraPipe gpipe with those; ZB-V is auto with two chunks and --pipeline-placement v. docs/schedules.md
has ZB-2p, DualPipe and others.
"""

# Tested in commands/test_schedule_commands.py.

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from ..arguments.flags import given_path, number_type
from ..costs.execution import execute_lowered
from ..costs.simulator import check_size
from ..files.costs_file import read_costs
from ..files.schedule_file import read_schedule, write_schedule
from ..files.timeline_file import read_timeline, write_timeline
from ..files.typed import named_by
from ..process.flag_names import flag_of
from ..report import plot_timelines, write_trace
from ..schedule import (
    FAMILY_NAMES,
    MOVE_KINDS,
    PLACEMENTS,
    Costs,
    Placement,
    Schedule,
    Shape,
    Timeline,
    build,
    lower,
    moved,
    simulate,
)
from .parsing import PICTURES, Parser, amount, count, output_path

# Simulating or drawing as many takes half a minute; a figure of more shows nothing.
MOST_ACTIONS = 200_000
MOST_DRAWN = 30_000
_USUAL_WIDTH = 8.0  # inches
EQUAL_COSTS = "f=1,i=1,w=1"


def make_parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--pipeline-schedule", choices=FAMILY_NAMES, help="a named schedule; default: 1f1b")
    source.add_argument("--pipeline-schedule-file", type=given_path, metavar="FILE.csv", help="a schedule of your own")
    source.add_argument(
        "--timeline", type=given_path, nargs="+", metavar="FILE.json", help="one panel for each timeline"
    )
    add("--pipeline-model-parallel-size", type=count, metavar="P", help="ranks; default: 4")
    add("--num-microbatches", type=count, metavar="M", help="default: 8")
    add("--sequence-splits", type=count, metavar="K", help="segments of each sequence; default: 1")
    chunks = "model chunks on each rank; default: 1"
    add("--num-virtual-stages-per-pipeline-rank", type=count, metavar="C", help=chunks)
    share = "share of the activations that waits on the host; with move=1 in --costs a copy takes 1; default: 0"
    add("--offload-activations", type=float, metavar="FRACTION", help=share)
    add("--pipeline-placement", choices=PLACEMENTS, help="of the model chunks; default: looped")
    beside = "let a forward and a backward of other units run beside each other"
    add("--overlap-moe-expert-parallel-comm", action="store_true", default=None, help=beside)
    times = (
        f"times of forward, of input and weight gradient, and of a message; default: {EQUAL_COSTS},message=0; or a "
        "JSON file with the same names, in which a value may be a list over segments, or over stages and segments"
    )
    add("--costs", metavar="COSTS", help=times)
    limit = "activation memory of a rank for auto; default: the peak of 1f1b"
    add("--memory-limit", type=amount, metavar="UNITS", help=limit)
    inches = "of a figure; default: 8, and 3.3 is one column of a paper"
    width = number_type(float, lambda width: 2 <= width <= 100, "not from 2 to 100")
    add("--width", type=width, metavar="INCHES", help=inches)
    add("--no-labels", action="store_true", help="draw boxes without the numbers of micro-batches")
    path = output_path(*PICTURES, ".trace.json", ".json", ".csv")
    written = "the file to write, in the form of its ending; default: %(default)s"
    add("--output", type=path, default="schedule.png", metavar="FILE", help=written)
    return parser


# The sizes of a schedule that is built, where they are not given.
_USUAL_SIZES: dict[str, Any] = {
    "pipeline_model_parallel_size": 4,
    "num_microbatches": 8,
    "sequence_splits": 1,
    "num_virtual_stages_per_pipeline_rank": 1,
    "pipeline_placement": "looped",
}


def _refuse_without_effect(args: argparse.Namespace) -> None:
    """A file has its own sizes, only a picture has a width and labels, and one chunk a rank has no turn."""
    if args.output.suffix not in PICTURES and (args.width is not None or args.no_labels):
        flag = "--no-labels" if args.width is None else "--width"
        raise ValueError(f"{flag} is for pictures, and --output {args.output.name} is none; drop it")
    without_effect = [*_USUAL_SIZES, "memory_limit", "offload_activations", "overlap_moe_expert_parallel_comm"]
    if args.timeline:
        file = "--timeline"
        without_effect.append("costs")
    elif args.pipeline_schedule_file:
        file = "--pipeline-schedule-file"
    else:
        if args.pipeline_placement == "v" and (args.num_virtual_stages_per_pipeline_rank or 1) == 1:
            raise ValueError(
                "--pipeline-placement v places several model chunks on each rank, but there is one; add "
                "--num-virtual-stages-per-pipeline-rank 2"
            )
        return
    for name in without_effect:
        if getattr(args, name) is not None:
            raise ValueError(f"{flag_of(name)} has no effect beside {file}; drop one of them")


def _text_of_costs(args: argparse.Namespace) -> str:
    return EQUAL_COSTS if args.costs is None else args.costs


class _Step(NamedTuple):
    """A schedule, its costs, and the time to copy a unit to the host or back, if it is given."""

    schedule: Schedule
    costs: Costs
    copy_time: float | None


def _step(args: argparse.Namespace) -> _Step:
    """The step of the flags. Raises ValueError for the time of a copy where nothing is copied."""
    step = _given_step(args)
    if step.copy_time is not None and not step.schedule.has_moves:
        way_out = "give a --pipeline-schedule-file with OFFLOAD"
        if not args.pipeline_schedule_file:
            way_out = "add --offload-activations 1"
        raise ValueError(
            f"--costs {_text_of_costs(args)}: move={step.copy_time:g} has no effect, since nothing moves to the host; "
            f"{way_out}, or drop it"
        )
    return step


def _given_step(args: argparse.Namespace) -> _Step:
    """A schedule from a file, or built, with what --costs says."""
    text = _text_of_costs(args)
    if args.pipeline_schedule_file:
        with named_by("--pipeline-schedule-file"):
            schedule = read_schedule(args.pipeline_schedule_file)
        costs, copy_time = read_costs(schedule.shape, text)
        return _Step(schedule, costs, copy_time)
    sizes = {name: getattr(args, name) or usual for name, usual in _USUAL_SIZES.items()}
    placement = Placement(
        num_ranks=sizes["pipeline_model_parallel_size"],
        num_chunks=sizes["num_virtual_stages_per_pipeline_rank"],
        style=sizes["pipeline_placement"],
    )
    shape = Shape(placement, sizes["num_microbatches"], sizes["sequence_splits"])
    check_size(shape, MOST_ACTIONS)
    costs, copy_time = read_costs(shape, text)
    family = args.pipeline_schedule or "1f1b"
    has_pairs = bool(args.overlap_moe_expert_parallel_comm)
    place: AbstractContextManager[None] = nullcontext()
    if has_pairs:
        place = named_by("--overlap-moe-expert-parallel-comm:")
    elif args.memory_limit is not None:
        place = named_by(f"--memory-limit {args.memory_limit:g}:")
    with place:
        built = build(family, shape, costs, args.memory_limit, has_pairs)
    return _Step(moved(built, args.offload_activations or 0.0), costs, copy_time)


def _simulated(args: argparse.Namespace, step: _Step) -> Timeline:
    schedule = step.schedule
    if schedule.has_moves:
        copies = ((step.copy_time or 0.0,) * schedule.shape.num_segments,) * schedule.shape.num_stages
        timeline = execute_lowered(lower(schedule), step.costs, dict.fromkeys(MOVE_KINDS, copies))
    else:
        timeline = simulate(schedule, step.costs)
    text = _text_of_costs(args)
    if not 0 < timeline.makespan < inf:
        raise ValueError(f"--costs {text}: a step must take some time, and not {timeline.makespan:g}")
    own = args.pipeline_schedule_file
    name = own.name if own else args.pipeline_schedule or "1f1b"
    if args.overlap_moe_expert_parallel_comm:
        name += " in pairs"
    return replace(timeline, meta={"schedule": name, "costs": text}, time_unit="")  # --costs has no unit


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    _refuse_without_effect(args)
    if args.memory_limit is not None and args.pipeline_schedule != "auto":
        raise ValueError("--memory-limit is for --pipeline-schedule auto")
    output = args.output
    if args.timeline:
        timelines = [read_timeline(path) for path in args.timeline]
    else:
        step = _step(args)
        if output.suffix == ".csv":
            write_schedule(step.schedule, output)
            print(f"{output} written.")
            return
        timelines = [_simulated(args, step)]

    num_actions = sum(len(spans) for timeline in timelines for spans in timeline.ranks)
    if output.suffix in PICTURES and num_actions > MOST_DRAWN:
        raise ValueError(
            f"--output {output.name}: {num_actions:,} actions are too many for a picture, which holds {MOST_DRAWN:,}; "
            "write a .trace.json, which ui.perfetto.dev opens"
        )
    if output.suffix in PICTURES:
        plot_timelines(timelines, output, width=args.width or _USUAL_WIDTH, has_labels=not args.no_labels)
    elif len(timelines) > 1 or output.suffix == ".csv":
        raise ValueError(f"--output {output.name}: a .csv holds a schedule, a .json one timeline")
    elif output.name.endswith(".trace.json"):
        write_trace(timelines[0], output)
    else:
        write_timeline(timelines[0], output)
    print(f"{output} written.")
