"""The flags of a rehearsal."""

import argparse
import math
from pathlib import Path


def add_rehearsal_flags(group: argparse._ArgumentGroup) -> None:
    """Add `--dry-run` and what belongs to it."""
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Rehearse the launch on this machine, without GPUs, torchrun or a queue: WORLD_SIZE=64 python "
        "pretrain_gpt.py ... --dry-run. Every pipeline stage is built and runs one step on tensors without values; "
        "shows whether the launch starts, its memory and messages. See docs/rehearsal.md.",
    )
    group.add_argument(
        "--device-memory",
        type=_gibibytes,
        default=80.0,
        metavar="GIB",
        help="Memory of a GPU that --dry-run compares with. Default: 80.",
    )
    group.add_argument(
        "--dry-run-output",
        type=Path,
        metavar="DIR",
        help="Write what --dry-run finds to DIR: rehearsal.json, and the memory over the step as memory.png.",
    )


def _gibibytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0 in GiB")
    return size
