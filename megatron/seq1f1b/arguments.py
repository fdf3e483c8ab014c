"""Our command-line flags: add them, validate them, turn them into one frozen PipelineConfig."""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .compatibility import packs_documents, refusal, segments_are_possible
from .config import PipelineConfig
from .costs import A100, CPU_CORE
from .model_arguments import layers_per_stage, model_shape
from .schedule import FAMILY_NAMES, Kind, Placement, Schedule, Shape, build
from .split_arguments import add_split_arguments, set_number_of_splits, warn_of_short_segments

# On failure the launcher ends all ranks as soon as one is gone; the others leave rank 0 the time to say why.
_SECONDS_FOR_RANK_0 = 20


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
    add_split_arguments(group)
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
        help="Write when each forward and backward of the iterations of --pipeline-trace-iterations ran, the gradient "
        "reductions and parameter gatherings beside them, and the peak memory of each pipeline rank, to one JSON file "
        "per iteration in DIR; tools/plot_schedule.py draws it. Works for Megatron's own schedules too.",
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


def parse_options(options: Mapping[str, Any]) -> argparse.Namespace:
    """Our flags given by name: `sequence_splits=4` for `--sequence-splits 4`. Raises ValueError for what is no flag."""
    parser = add_arguments(argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False))
    words = []
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        words += f"--{name.replace('_', '-')}", *map(str, values)
    try:
        parsed, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown:
        raise ValueError(f"{unknown[0]} is not a flag of megatron.seq1f1b")
    return parsed


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
    message = problem(args)
    if message is not None:
        if _is_rank_0():
            print(f"error: {message}.", file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_FOR_RANK_0)
        raise SystemExit(2)


def problem(args: argparse.Namespace) -> str | None:
    """Why the flags cannot be honoured, in one sentence without its full stop, or None."""
    try:
        set_number_of_splits(args, pipeline_config)
        config = pipeline_config(args)
        schedule = config.read_schedule()
        if schedule is None:
            return None
        lengths = config.cut(args.seq_length)
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    message = _misfit(schedule.shape, args) if isinstance(schedule, Schedule) else None
    message = message or refusal(args, config.num_segments > 1, _splits_backwards(schedule))
    if message is None and _on_cpu(args) and _is_rank_0():
        warn_of_short_segments(lengths)
    return message


def _misfit(shape: Shape, args: argparse.Namespace) -> str | None:
    """How the schedule of a file differs from what the other flags ask for."""
    if args.step_batch_size_schedule:
        return (
            "--step-batch-size-schedule changes the number of micro-batches, which --pipeline-schedule-file fixes; "
            "drop one"
        )
    asked = Shape(
        Placement(args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1, _placement(args)),
        _num_microbatches(args),
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
    if isinstance(schedule, str):
        schedule = build(schedule, Shape(Placement(2), num_microbatches=2))  # as all of its family
    return any(action.kind is Kind.W for actions in schedule.ranks for action in actions)


def pipeline_config(args: argparse.Namespace) -> PipelineConfig:
    """The configuration that Megatron's parsed arguments stand for."""
    return PipelineConfig(
        schedule=args.pipeline_schedule_file or _family(args),
        placement=_placement(args),
        num_segments=1 if args.sequence_splits is None else args.sequence_splits,
        split_strategy=args.sequence_split_strategy,
        split_file=args.sequence_split_file,
        split_profile=args.sequence_split_profile,
        segment_multiple=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        model=model_shape(args) if _tells_sizes(args) else None,
        layers_per_stage=layers_per_stage(args) if _tells_sizes(args) else (),
        recomputes_layers=getattr(args, "recompute_granularity", None) == "full",
        tensor_parallel_size=args.tensor_model_parallel_size,
        num_microbatches=_num_microbatches(args),
        throughput=CPU_CORE if _on_cpu(args) else A100,
        trace_directory=args.pipeline_trace,
        trace_iterations=tuple(args.pipeline_trace_iterations),
    )


def _placement(args: argparse.Namespace) -> str:
    return getattr(args, "placement", "looped")


def _tells_sizes(args: argparse.Namespace) -> bool:
    return getattr(args, "padded_vocab_size", None) is not None


def wants_segment_attention(args: argparse.Namespace) -> bool:
    """Whether a script should build local layers with our attention, also for Megatron's own schedules.

    Its kernels are several times faster than Megatron's unfused attention, which `--attention-backend local` keeps.
    """
    is_local = args.transformer_impl == "local" and args.attention_backend.name != "local"
    return is_local and segments_are_possible(args) and not packs_documents(args)


def follows_documents(args: argparse.Namespace) -> bool:
    """Whether our schedules keep attention within the documents of packed sequences, whatever masks a batch brings."""
    return packs_documents(args) and segments_are_possible(args) and pipeline_config(args).schedule is not None


def _family(args: argparse.Namespace) -> str | None:
    if args.pipeline_schedule is None and args.sequence_splits is not None:
        return "1f1b"
    return args.pipeline_schedule


def _num_microbatches(args: argparse.Namespace) -> int:
    sizes = [getattr(args, name, None) for name in ("global_batch_size", "micro_batch_size", "data_parallel_size")]
    return max(1, sizes[0] // (sizes[1] * sizes[2])) if all(sizes) else 1


def _on_cpu(args: argparse.Namespace) -> bool:
    import torch

    return args.device == "cpu" or args.device == "auto" and not torch.cuda.is_available()


def _is_rank_0() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
