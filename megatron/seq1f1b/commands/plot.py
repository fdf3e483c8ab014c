"""Draw the timeline of a schedule, or write it as JSON, CSV or a trace for Perfetto.

    seq1f1b plot --pipeline-schedule 1f1b --pipeline-model-parallel-size 8 \\
        --num-microbatches 8 --sequence-splits 4 --output seq1f1b.png

The ending of --output determines what is written: .png, .svg, .pdf (a figure), .trace.json (a
trace that ui.perfetto.dev opens), .json (the timeline), .csv (the schedule, to be changed by hand
and given to --pipeline-schedule-file). --timeline draws measured timelines.
"""

import argparse
from dataclasses import replace
from math import inf
from pathlib import Path

from ..arguments.flags import value
from ..files import read_costs, read_timeline
from ..planning.simulator import execute_lowered
from ..report import plot_timelines, write_trace
from ..schedule import FAMILY_NAMES, MOVE_KINDS, PLACEMENTS, Placement, Shape, build, lower, moved, simulate
from ..schedule.csv_file import read_csv, write_csv
from ..schedule.timeline import write_timeline
from .parsing import PICTURES, Parser, amount, check_size, count, output_path

# Simulating or drawing as many takes half a minute; a figure of more shows nothing.
MOST_ACTIONS, MOST_DRAWN = 200_000, 30_000
EQUAL_COSTS = "f=1,i=1,w=1"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--pipeline-schedule", choices=FAMILY_NAMES, help="a named schedule; default: 1f1b")
    source.add_argument("--pipeline-schedule-file", type=Path, metavar="CSV", help="a schedule of your own")
    source.add_argument("--timeline", type=Path, nargs="+", metavar="JSON", help="one panel for each timeline")
    add("--pipeline-model-parallel-size", type=count, metavar="P", help="ranks; default: 4")
    add("--num-microbatches", type=count, metavar="M", help="default: 8")
    add("--sequence-splits", type=count, metavar="K", help="segments of each sequence; default: 1")
    add("--num-virtual-stages", type=count, metavar="C", help="model chunks on each rank; default: 1")
    share = "share of the activations that waits on the host; with move=1 in --costs a copy takes 1; default: 0"
    add("--offload-activations", type=float, metavar="FRACTION", help=share)
    add("--placement", choices=PLACEMENTS, help="of the model chunks; default: looped")
    times = f"times of forward, of input and weight gradient, and of a message; default: {EQUAL_COSTS},message=0; or a "
    times += "JSON file with the same names, in which a value may be a list over segments, or over stages and segments"
    add("--costs", metavar="COSTS", help=times)
    limit = "activation memory of a rank for auto; default: the peak of 1f1b"
    add("--memory-limit", type=amount, metavar="UNITS", help=limit)
    inches = "of a figure; default: 8, and 3.3 is one column of a paper"
    width = value(float, lambda width: 2 <= width <= 100, "not from 2 to 100")
    add("--width", type=width, default=8.0, metavar="INCHES", help=inches)
    add("--no-labels", action="store_true", help="draw boxes without the numbers of micro-batches")
    path = output_path(*PICTURES, ".trace.json", ".json", ".csv")
    add("--output", type=path, required=True, help="the file to write; its ending determines the form")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    output, own, chosen = args.output, args.pipeline_schedule_file, vars(args)
    sizes = {"pipeline_model_parallel_size": 4, "num_microbatches": 8, "sequence_splits": 1, "num_virtual_stages": 1}
    sizes |= {"placement": "looped"}
    if file := "--timeline" if args.timeline else "--pipeline-schedule-file" if own else None:
        for name in (*sizes, "memory_limit", "offload_activations", *(["costs"] if args.timeline else [])):
            if chosen[name] is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no effect beside {file}; drop one of them")
    family = args.pipeline_schedule or "1f1b"
    if args.memory_limit is not None and family != "auto":
        raise ValueError("--memory-limit is for --pipeline-schedule auto")
    if args.timeline:
        timelines = [read_timeline(path) for path in args.timeline]
    else:
        text, schedule = args.costs or EQUAL_COSTS, own and read_csv(own)
        ranks, microbatches, segments, chunks, style = (chosen[name] or usual for name, usual in sizes.items())
        shape = schedule.shape if own else Shape(Placement(ranks, chunks, style), microbatches, segments)
        costs, move = read_costs(shape, text)
        if not own:
            check_size(shape, MOST_ACTIONS)
            schedule = moved(build(family, shape, costs, args.memory_limit), args.offload_activations or 0.0)
        if output.suffix == ".csv":
            return write_csv(schedule, output)
        copies = ((move,) * shape.num_segments,) * shape.num_stages
        moves = dict.fromkeys(MOVE_KINDS, copies)
        timeline = execute_lowered(lower(schedule), costs, moves) if schedule.has_moves else simulate(schedule, costs)
        if not 0 < timeline.makespan < inf:
            raise ValueError(f"--costs {text}: a step must take some time, and not {timeline.makespan:g}")
        timelines = [replace(timeline, meta={"schedule": own.name if own else family, "costs": text})]

    num_actions = sum(len(spans) for timeline in timelines for spans in timeline.ranks)
    if output.suffix in PICTURES and num_actions > MOST_DRAWN:
        raise ValueError(
            f"--output {output.name}: {num_actions:,} actions are too many for a picture, which holds {MOST_DRAWN:,}; "
            "write a .trace.json, which ui.perfetto.dev opens"
        )
    if output.suffix in PICTURES:
        plot_timelines(timelines, output, width=args.width, has_labels=not args.no_labels)
    elif len(timelines) > 1 or output.suffix == ".csv":
        raise ValueError(f"--output {output.name}: a .csv holds a schedule, a .json one timeline")
    else:
        (write_trace if output.name.endswith(".trace.json") else write_timeline)(timelines[0], output)
