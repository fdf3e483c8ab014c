"""Check a schedule of your own before training with --pipeline-schedule-file.

    seq1f1b check my_schedule.csv

Prints its sizes, bubble ratio and memory if it can run; otherwise shows what is wrong and where, with exit code 2.
"""

# Tested in commands/test_schedule_commands.py.

from pathlib import Path

from ..schedule import read_csv, sequences_held, simulate
from .parsing import Parser


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("schedule", type=Path, metavar="FILE.csv", help="one row for each rank, cells such as 2F3.1")
    return parser


def main(argv: list[str] | None = None) -> None:
    path = make_parser().parse_args(argv).schedule
    schedule = read_csv(path)
    shape = schedule.shape
    style = schedule.shape.placement.style
    print(
        f"{path}: valid; {shape.num_ranks} ranks, {shape.num_chunks} model chunks on each ({style}), "
        f"{shape.num_microbatches} micro-batches, {shape.num_segments} segments"
    )
    print(f"bubble ratio for equal F, I and W: {simulate(schedule.without_moves()).bubble_ratio:.4f}")
    held = (f"{sequences_held(actions, shape):.2f}" for actions in schedule.ranks)
    print("most sequences held by each rank, of all its layers:", *held)
