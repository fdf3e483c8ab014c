"""The flags that say where sequences are cut."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from .config import PipelineConfig
from .costs import CPU_CORE
from .partition import STRATEGIES, read_lengths

# The authors of Seq1F1B call equal lengths "average".
_STRATEGY_ALIASES = {"average": "even"}


def add_split_arguments(group: argparse._ArgumentGroup) -> None:
    """Add them to a group of a parser."""
    group.add_argument(
        "--sequence-splits",
        "--pipe-sp-splits",
        type=int,
        metavar="K",
        help="Number of segments that every sequence is cut into. 4 is a good start: the bubble and the activation "
        "memory shrink with K until the segments become too short to keep the device busy. Default: 1, sequences "
        "stay whole.",
    )
    group.add_argument(
        "--sequence-split-strategy",
        "--pipe-sp-strategy",
        type=lambda name: _STRATEGY_ALIASES.get(name, name),
        choices=sorted(STRATEGIES),
        default="even",
        help="Where sequences are cut. Later segments attend to more tokens, so equal lengths mean unequal work, and "
        "ranks wait for each other; it shows from about 16k tokens on. 'even': equal lengths. 'balanced': equal "
        "forward-plus-backward time on the slowest stage, by the FLOPs of your model; the one for long sequences. "
        "Where documents are packed and stay apart, it cuts each micro-batch by its own. "
        "'uniform_comp': the computation-wise partition of the Seq1F1B authors. 'terapipe': the dynamic programme of "
        "TeraPipe (arXiv 2102.07988), least time of a step; without --sequence-splits it also chooses the number of "
        "segments. 'profile': 'balanced' by the times in --sequence-split-profile. tools/plan_split.py compares them. "
        "Default: 'even' (also accepted as 'average').",
    )
    group.add_argument(
        "--sequence-split-profile",
        type=Path,
        metavar="JSON",
        help="Times of segments measured on your hardware, for --sequence-split-strategy profile, balanced and "
        "terapipe: by tools/profile_segments.py before there is a run, or a trace that --pipeline-trace wrote in a "
        "short run of yours with --sequence-splits, whatever its parallelism and its layers.",
    )
    group.add_argument(
        "--sequence-split-file",
        type=Path,
        metavar="FILE",
        help="The lengths of the segments in tokens, first to last, as a JSON list or as text such as '4096 2048 "
        "2048', instead of a strategy. They must add up to --seq-length; --sequence-splits may be left out.",
    )


def set_number_of_splits(args: argparse.Namespace, config_of: Callable[[argparse.Namespace], PipelineConfig]) -> None:
    """A file gives the number of segments, and TeraPipe's programme finds it, where --sequence-splits does not."""
    if args.sequence_splits is not None:
        return
    if args.sequence_split_file is not None:
        args.sequence_splits = len(read_lengths(args.sequence_split_file))
    elif args.sequence_split_strategy == "terapipe":
        args.sequence_splits = config_of(args).best_num_segments(args.seq_length)


def warn_of_short_segments(lengths: tuple[int, ...]) -> None:
    """To be called on one rank of a job on CPUs."""
    if len(lengths) > 1 and min(lengths) < CPU_CORE.full_speed_rows:
        print(
            f"warning: the shortest segment has {min(lengths)} tokens; on a CPU attention is up to 2.3 times slower "
            f"for segments of less than {CPU_CORE.full_speed_rows}. Fewer --sequence-splits or a longer --seq-length "
            "avoid that.",
            file=sys.stderr,
            flush=True,
        )
