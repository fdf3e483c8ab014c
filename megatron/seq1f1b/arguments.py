"""Our command-line flags: add them, validate them, turn them into one frozen PipelineConfig."""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .compatibility import refusal, segments_are_possible
from .partition import STRATEGIES, ModelShape, SplitError, cut_sequence
from .schedule import FAMILIES

# The authors of Seq1F1B call equal lengths "average".
_STRATEGY_ALIASES = {"average": "even"}

# On failure the launcher ends all ranks as soon as one is gone; the others leave rank 0 the time to say why.
_SECONDS_FOR_RANK_0 = 20


@dataclass(frozen=True)
class PipelineConfig:
    """What our flags ask for. `schedule` is None if Megatron's own schedule is to run untouched.

    Segments are multiples of `segment_multiple` tokens.
    """

    schedule: str | None
    num_segments: int
    split_strategy: str
    segment_multiple: int
    model: ModelShape
    trace_directory: Path | None
    trace_iterations: tuple[int, ...]

    def cut(self, sequence_length: int) -> tuple[int, ...]:
        """Lengths of the segments of a sequence; raises SplitError."""
        return cut_sequence(
            self.split_strategy, sequence_length, self.num_segments, self.segment_multiple, self.model
        )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser; an `extra_args_provider`."""
    group = parser.add_argument_group(
        "sequence-level pipeline parallelism",
        "Cut each sequence into segments and schedule those, for smaller pipeline bubbles and less activation memory. "
        "Without these flags Megatron's own schedules run untouched.",
    )
    group.add_argument(
        "--pipeline-schedule",
        choices=sorted(FAMILIES),
        help="Order in which pipeline ranks run forwards and backwards. '1f1b' is one forward, one backward; together "
        "with --sequence-splits it is Seq1F1B (arXiv 2406.03488). Default: '1f1b' if --sequence-splits is given, else "
        "Megatron's own schedule.",
    )
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
        help="Where sequences are cut. 'even': segments of equal length. 'uniform_comp': segments of equal work, the "
        "computation-wise partition of the Seq1F1B authors; later segments attend to more tokens and are made "
        "shorter, which pays off from about 16k tokens. Default: 'even' (also accepted as 'average').",
    )
    group.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="Where to train. 'auto' takes the GPU if there is one and the CPU otherwise.",
    )
    group.add_argument(
        "--pipeline-trace",
        type=Path,
        metavar="DIR",
        help="Write when each forward and backward of the iterations of --pipeline-trace-iterations ran, and the peak "
        "memory of each pipeline rank, to one JSON file per iteration in DIR; tools/plot_schedule.py draws it. Works "
        "for Megatron's own schedules too.",
    )
    group.add_argument(
        "--pipeline-trace-iterations",
        type=int,
        nargs="+",
        default=[3],
        metavar="N",
        help="Iterations to trace, counted from 1. Default: 3.",
    )
    _mend_help(parser)
    return parser


def has_our_flags(parser: argparse.ArgumentParser) -> bool:
    """Whether somebody has called `add_arguments` on the parser."""
    return "--sequence-splits" in parser._option_string_actions


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Megatron 0.19 has a bare percent sign in a help text, at which --help fails."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except ValueError:
            action.help = action.help.replace("%", "%%")
        except TypeError:  # no help text
            continue


def validate(args: argparse.Namespace) -> None:
    """Check our flags against Megatron's parsed ones.

    What cannot be honoured ends the program: one sentence on rank 0, a non-zero exit on all ranks.
    """
    message = refusal(args) if _schedule_name(args) else None
    if message is None:
        try:
            pipeline_config(args).cut(args.seq_length)
        except SplitError as error:
            message = str(error)
    if message is not None:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {message}.", file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_FOR_RANK_0)
        raise SystemExit(2)


def pipeline_config(args: argparse.Namespace) -> PipelineConfig:
    """The configuration that Megatron's parsed arguments stand for."""
    return PipelineConfig(
        schedule=_schedule_name(args),
        num_segments=1 if args.sequence_splits is None else args.sequence_splits,
        split_strategy=args.sequence_split_strategy,
        segment_multiple=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        model=ModelShape(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_heads=args.num_attention_heads,
            head_dim=args.kv_channels,
            vocab_size=args.padded_vocab_size,
        ),
        trace_directory=args.pipeline_trace,
        trace_iterations=tuple(args.pipeline_trace_iterations),
    )


def wants_segment_attention(args: argparse.Namespace) -> bool:
    """Whether a script should build local layers with our attention, also for Megatron's own schedules.

    Its kernels are several times faster than Megatron's unfused attention, which `--attention-backend local` keeps.
    """
    is_local = args.transformer_impl == "local" and args.attention_backend.name != "local"
    return is_local and segments_are_possible(args)


def _schedule_name(args: argparse.Namespace) -> str | None:
    if args.pipeline_schedule is None and args.sequence_splits is not None:
        return "1f1b"
    return args.pipeline_schedule
