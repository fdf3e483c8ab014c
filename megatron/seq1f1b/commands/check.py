"""Check a schedule of your own before training with --pipeline-schedule-file.

    seq1f1b check my_schedule.csv

Prints its sizes, bubble ratio and memory if it can run; otherwise shows what is wrong and where, with exit code 2.
"""

# Tested in commands/test_schedule_commands.py.

from ..arguments.flags import given_path
from ..files.schedule_file import read_schedule
from ..schedule import sequences_held, simulate
from .parsing import Parser


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument(
        "schedule", type=given_path, metavar="FILE.csv", help="one row for each rank, cells such as 2F3.1"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    path = make_parser().parse_args(argv).schedule
    schedule = read_schedule(path)
    shape = schedule.shape
    style = schedule.shape.placement.style
    print(
        f"{path}: valid; ranks: {shape.num_ranks}, model chunks on each: {shape.num_chunks} ({style}), "
        f"micro-batches: {shape.num_microbatches}, segments: {shape.num_segments}"
    )
    print(f"bubble ratio for equal F, I and W: {simulate(schedule.without_moves()).bubble_ratio:.4f}")
    held = (f"{sequences_held(actions, shape):.2f}" for actions in schedule.ranks)
    print("most sequences held by each rank, of all its layers:", *held)
