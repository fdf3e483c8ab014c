"""Our command-line flags: add them, validate them, turn them into one frozen PipelineConfig."""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .compatibility import refusal, segments_are_possible
from .partition import STRATEGIES, ModelShape, cut_sequence
from .schedule import FAMILY_NAMES, Kind, Placement, Schedule, Shape, read_csv

# The authors of Seq1F1B call equal lengths "average".
_STRATEGY_ALIASES = {"average": "even"}

# The families whose backwards come in two halves.
_SPLIT_FAMILIES = ("auto", "zb-h1")

# On failure the launcher ends all ranks as soon as one is gone; the others leave rank 0 the time to say why.
_SECONDS_FOR_RANK_0 = 20


@dataclass(frozen=True)
class PipelineConfig:
    """What our flags ask for. `schedule` is None if Megatron's own schedule is to run untouched, a path to read it.

    Segments are multiples of `segment_multiple` tokens.
    """

    schedule: str | Path | None
    num_segments: int
    split_strategy: str
    segment_multiple: int
    model: ModelShape
    trace_directory: Path | None
    trace_iterations: tuple[int, ...]

    def read_schedule(self) -> str | Schedule | None:
        """The name of a family, or the schedule in the file; raises OSError and ValueError."""
        return read_csv(self.schedule) if isinstance(self.schedule, Path) else self.schedule

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
        choices=sorted(FAMILY_NAMES),
        help="Order in which pipeline ranks run forwards and backwards. '1f1b' is one forward, one backward, with "
        "several model chunks interleaved; together with --sequence-splits it is Seq1F1B (arXiv 2406.03488). 'gpipe' "
        "runs all forwards first. 'breadth-first' runs all of a model chunk before the next. 'zb-h1' computes weight "
        "gradients apart, where a rank would be idle. 'auto' searches for a better order still. Default: '1f1b' if "
        "--sequence-splits is given, else Megatron's own schedule.",
    )
    group.add_argument(
        "--pipeline-schedule-file",
        type=Path,
        metavar="FILE.csv",
        help="Run the schedule in this file instead of a named one: a row for each pipeline rank, an action such as "
        "2F3.1 (stage 2, forward of micro-batch 3, segment 1) in each cell; see docs/schedules.md.",
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
    message = _problem(args)
    if message is not None:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {message}.", file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_FOR_RANK_0)
        raise SystemExit(2)


def _problem(args: argparse.Namespace) -> str | None:
    config = pipeline_config(args)
    try:
        schedule = config.read_schedule()
        config.cut(args.seq_length)
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    if schedule is None:
        return None
    if isinstance(schedule, Schedule):
        message = _misfit(schedule.shape, args)
        if message is not None:
            return message
    return refusal(args, config.num_segments > 1, _splits_backwards(schedule))


def _misfit(shape: Shape, args: argparse.Namespace) -> str | None:
    """How the schedule of a file differs from what the other flags ask for."""
    if args.rampup_batch_size:
        return "--rampup-batch-size changes the number of micro-batches, which --pipeline-schedule-file fixes; drop one"
    asked = Shape(
        Placement(args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1),
        args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        args.sequence_splits or 1,
    )
    if shape == asked:
        return None
    return f"--pipeline-schedule-file is for {_words(shape)}, but the other flags ask for {_words(asked)}"


def _words(shape: Shape) -> str:
    return (
        f"{shape.num_ranks} ranks with {shape.num_chunks} model chunks each ({shape.placement.style}), "
        f"{shape.num_microbatches} micro-batches and {shape.num_segments} segments"
    )


def _splits_backwards(schedule: str | Schedule) -> bool:
    if isinstance(schedule, Schedule):
        return any(action.kind is Kind.W for actions in schedule.ranks for action in actions)
    return schedule in _SPLIT_FAMILIES


def pipeline_config(args: argparse.Namespace) -> PipelineConfig:
    """The configuration that Megatron's parsed arguments stand for."""
    return PipelineConfig(
        schedule=args.pipeline_schedule_file or _family(args),
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


def _family(args: argparse.Namespace) -> str | None:
    if args.pipeline_schedule is None and args.sequence_splits is not None:
        return "1f1b"
    return args.pipeline_schedule
