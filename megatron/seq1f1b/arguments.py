"""Our command-line flags: add them, validate them, turn them into one frozen PipelineConfig."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .compatibility import packs_documents, refusal, segments_are_possible
from .model_arguments import layers_per_stage, model_shape
from .partition import (
    A100,
    CPU_CORE,
    STRATEGIES,
    STRATEGIES_BY_COST,
    STRATEGIES_BY_DOCUMENTS,
    ModelShape,
    Rates,
    StageCost,
    analytic_costs,
    check_lengths,
    check_profile,
    cut_sequence,
    read_lengths,
    read_profile,
    slowest,
    terapipe,
)
from .schedule import FAMILY_NAMES, Costs, Kind, Placement, Schedule, Shape, read_csv
from .simulator import action_costs

# The authors of Seq1F1B call equal lengths "average".
_STRATEGY_ALIASES = {"average": "even"}

# The families whose backwards come in two halves.
_SPLIT_FAMILIES = ("auto", "zb-h1")

# On failure the launcher ends all ranks as soon as one is gone; the others leave rank 0 the time to say why.
_SECONDS_FOR_RANK_0 = 20


@dataclass(frozen=True)
class PipelineConfig:
    """What our flags ask for. `schedule` is None if Megatron's own schedule is to run untouched, a path to read it.
    `placement` is that of the model chunks, looped as Megatron builds them if a program does not build its own.

    Segments are multiples of `segment_multiple` tokens. `model` is None if its sizes are not known. `layers_per_stage`
    counts transformer layers in the order of depth; `split_file` takes the place of a strategy, `split_profile` that of
    `rates`.
    """

    schedule: str | Path | None
    placement: str
    num_segments: int
    split_strategy: str
    split_file: Path | None
    split_profile: Path | None
    segment_multiple: int
    model: ModelShape | None
    layers_per_stage: tuple[int, ...]
    recomputes_layers: bool
    tensor_parallel_size: int
    num_microbatches: int
    rates: Rates
    trace_directory: Path | None
    trace_iterations: tuple[int, ...]

    def read_schedule(self) -> str | Schedule | None:
        """The name of a family, or the schedule in the file; raises OSError and ValueError."""
        return read_csv(self.schedule) if isinstance(self.schedule, Path) else self.schedule

    @property
    def cuts_by_documents(self) -> bool:
        """Whether packed sequences are cut micro-batch by micro-batch, each by its own documents."""
        return self.split_file is None and self.split_strategy in STRATEGIES_BY_DOCUMENTS

    def cut(self, sequence_length: int, documents: Sequence[Sequence[int]] | None = None) -> tuple[int, ...]:
        """Lengths of the segments of a sequence; raises SplitError. Can take a second for very long sequences.

        With the `documents` of a micro-batch, for each sequence the positions that they start at, the lengths may
        follow those.
        """
        if self.split_file is not None:
            lengths = read_lengths(self.split_file)
            check_lengths(lengths, self.split_file, sequence_length, self.num_segments, self.segment_multiple)
            return lengths
        is_without_profile = self.split_strategy == "profile" and self.split_profile is None
        has_costs = self.split_strategy in STRATEGIES_BY_COST and not is_without_profile
        return cut_sequence(
            self.split_strategy,
            sequence_length,
            self.num_segments,
            self.segment_multiple,
            self.model,
            self.costs if has_costs else None,
            self.rates.full_speed_rows,
            self.num_microbatches,
            documents,
        )

    def best_num_segments(self, sequence_length: int) -> int:
        """The number of segments of the fastest split by TeraPipe's dynamic programme; raises SplitError."""
        return len(
            terapipe(
                sequence_length,
                slowest(self.costs),
                num_stages=len(self.layers_per_stage),
                multiple_of=self.segment_multiple,
                num_microbatches=self.num_microbatches,
            )
        )

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """The cost of a segment on every stage, measured if there is a profile; raises SplitError."""
        if self.split_profile is None:
            return analytic_costs(self.model, self.layers_per_stage, self.rates, self.recomputes_layers)
        profile = read_profile(self.split_profile)
        check_profile(profile, self.split_profile, self.model, self.tensor_parallel_size)
        return profile.costs(self.layers_per_stage)

    def action_costs(self, lengths: Sequence[int]) -> Costs:
        """What `auto` plans for: the costs of actions on segments of `lengths` tokens; raises SplitError."""
        return action_costs(self.costs, self.layers_per_stage, lengths)


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
        help="Times of segments measured on your hardware by tools/profile_segments.py, for --sequence-split-strategy "
        "profile, balanced and terapipe.",
    )
    group.add_argument(
        "--sequence-split-file",
        type=Path,
        metavar="FILE",
        help="The lengths of the segments in tokens, first to last, as a JSON list or as text such as '4096 2048 "
        "2048', instead of a strategy. They must add up to --seq-length; --sequence-splits may be left out.",
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
        _set_number_of_splits(args)
        config = pipeline_config(args)
        schedule = config.read_schedule()
        if schedule is None:
            return None
        lengths = config.cut(args.seq_length)
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    message = _misfit(schedule.shape, args) if isinstance(schedule, Schedule) else None
    message = message or refusal(args, config.num_segments > 1, _splits_backwards(schedule))
    if message is None:
        _warn_of_short_segments(args, lengths)
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
    if isinstance(schedule, Schedule):
        return any(action.kind is Kind.W for actions in schedule.ranks for action in actions)
    return schedule in _SPLIT_FAMILIES


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
        rates=CPU_CORE if _on_cpu(args) else A100,
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


def _set_number_of_splits(args: argparse.Namespace) -> None:
    """A file gives the number of segments, and TeraPipe's programme finds it, where --sequence-splits does not."""
    if args.sequence_splits is not None:
        return
    if args.sequence_split_file is not None:
        args.sequence_splits = len(read_lengths(args.sequence_split_file))
    elif args.sequence_split_strategy == "terapipe":
        args.sequence_splits = pipeline_config(args).best_num_segments(args.seq_length)


def _warn_of_short_segments(args: argparse.Namespace, lengths: tuple[int, ...]) -> None:
    if len(lengths) > 1 and min(lengths) < CPU_CORE.full_speed_rows and _on_cpu(args) and _is_rank_0():
        print(
            f"warning: the shortest segment has {min(lengths)} tokens; on a CPU attention is up to 2.3 times slower "
            f"for segments of less than {CPU_CORE.full_speed_rows}. Fewer --sequence-splits or a longer --seq-length "
            "avoid that.",
            file=sys.stderr,
            flush=True,
        )


def _num_microbatches(args: argparse.Namespace) -> int:
    sizes = [getattr(args, name, None) for name in ("global_batch_size", "micro_batch_size", "data_parallel_size")]
    return max(1, sizes[0] // (sizes[1] * sizes[2])) if all(sizes) else 1


def _on_cpu(args: argparse.Namespace) -> bool:
    import torch

    return args.device == "cpu" or args.device == "auto" and not torch.cuda.is_available()


def _is_rank_0() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
