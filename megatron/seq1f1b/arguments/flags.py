"""Our command-line flags."""

import argparse
import difflib
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from ..partition import STRATEGIES
from ..process.ranks import warn_on_rank_0
from ..schedule import FAMILY_NAMES, PLACEMENTS, splitting_families

_log = logging.getLogger(__name__)

# The value of flags that lets us find the best value.
AUTO = "auto"

# The authors of Seq1F1B call equal lengths "average".
_STRATEGY_ALIASES = {"average": "even"}

# Other spellings of --sequence-splits, in the authors' Megatron and in Megatron-LM's pull request 3116. They mean equal
# lengths unless a strategy is given.
EQUAL_SPLITS = ("--pipe-sp-splits", "--chunked-pipeline-model-parallel-splits")

# Flags of the authors' Megatron and of pull request 3116 that Megatron lacks: how many values follow, and what replaces
# them.
_LENGTHS = "--chunked-pipeline-model-parallel-split-lengths"
_REMOVED: Mapping[str, tuple[int | str, str]] = MappingProxyType(
    {
        "--no-async-tensor-model-parallel-allreduce": (0, "Megatron always overlaps these all-reduces"),
        "--DDP-impl": (1, "Megatron has one implementation, its own"),
        "--data-impl": (1, "Megatron reads .bin/.idx pairs only"),
        "--moe-load-balancing-loss-mode-for-chunked-sequence": (1, "balance losses are those of the whole micro-batch"),
        _LENGTHS: ("+", "put these lengths into a file, and give it to --sequence-split-file"),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser; an `extra_args_provider`."""
    group = parser.add_argument_group(
        "sequence-level pipeline parallelism",
        "Cut each sequence into segments and schedule those, for smaller pipeline bubbles and less activation memory. "
        "Without these flags Megatron's own schedules run untouched.",
    )
    _add_schedule_arguments(group)
    _add_split_arguments(group)
    parser.set_defaults(means_equal_lengths=False)
    _add_removed_arguments(parser, group)
    _add_run_arguments(group)
    _add_rehearsal_arguments(group)
    for action in parser._actions:  # Megatron 0.19 has a bare percent sign in a help text, on which --help fails
        action.help = action.help and re.sub(r"(?<!%)%(?![%(])", "%%", action.help)
    parser.error = partial(refuse, parser)  # type: ignore[method-assign]
    return parser


def _add_schedule_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags for what runs when, and on which rank."""
    group.add_argument(
        "--pipeline-schedule",
        choices=sorted(FAMILY_NAMES),
        help="Order in which pipeline ranks run forwards and backwards. '1f1b' is one forward, one backward, with "
        "several model chunks interleaved; together with --sequence-splits it is Seq1F1B (arXiv 2406.03488). 'gpipe' "
        "runs all forwards first. 'breadth-first' runs all of a model chunk before the next. 'zb-h1' computes weight "
        "gradients apart, where a rank would be idle. 'auto' searches for an even better order. "
        f"{' and '.join(splitting_families())} split backwards into input and weight gradients. "
        "Where a model cannot, they are refused, and 'auto' leaves backwards whole. Default: '1f1b' if "
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
        "--pipeline-placement",
        choices=PLACEMENTS,
        default="looped",
        help="How several model chunks of a rank lie in the depth of the model. 'looped': as Megatron's, every chunk "
        "runs from the first pipeline rank to the last. 'v': every second chunk runs back, so that the first rank has "
        "the embedding and, with two chunks, the loss; with --pipeline-schedule auto about half the bubble of 1F1B at "
        "its memory. Checkpoints of the one can be loaded with the other. Default: 'looped'.",
    )


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags for what is kept and recomputed, the device and traces."""
    group.add_argument(
        "--recompute-keeps-attention",
        action="store_true",
        help="With --recompute-granularity full, recompute all of a layer but its attention, whose kernel is most of "
        "the work on long sequences: its output and log-sum-exp are kept, in 16 bits 2 h + 4 heads bytes a token, "
        "divided by the tensor-parallel size.",
    )
    group.add_argument(
        "--offload-activations",
        type=share_or_auto,
        default=0.0,
        metavar="FRACTION",
        help="Let this fraction of the activations that a rank would hold wait in the memory of its host, from 0 to 1, "
        "or 'auto', the least with which a step fits the device's memory. "
        "They leave when their forward has run and are back before their backward, both beside compute; those whose "
        "backward follows within a few actions stay. See docs/long-context.md. Default: 0.",
    )
    group.add_argument(
        "--keep-logits",
        action="store_true",
        help="Keep the logits of the last stage for the backward: 4 S V bytes for each sequence of S tokens and a "
        "vocabulary of V, divided by the tensor-parallel size. By default the loss of a micro-batch with more than 2 "
        "GiB of them is computed in pieces, and the logits of a piece again in its backward.",
    )
    group.add_argument(
        "--partition-state",
        action="store_true",
        help="With --use-distributed-optimizer, keep of weights and gradients, too, only what a data-parallel rank has "
        "to update. The weights of a model chunk are gathered for the micro-batches that it works on without a break, "
        "those of two chunks at most, and its gradients are reduced when it is done. With --pipeline-schedule "
        "breadth-first that is once forward and once backward in a step (arXiv 2106.02679).",
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
        help="Write when each forward and backward of the iterations of --pipeline-trace-iterations ran, the gradient "
        "reductions and parameter gatherings beside them, and the peak memory of each pipeline rank, to one JSON file "
        "per iteration in DIR; seq1f1b plot draws it. Works for Megatron's own schedules too.",
    )
    group.add_argument(
        "--pipeline-trace-iterations",
        type=value(int, lambda number: number >= 1, "no iteration, which are counted from 1"),
        nargs="+",
        default=[3],
        metavar="N",
        help="Iterations to trace, counted from 1. Default: 3.",
    )


def _add_rehearsal_arguments(group: argparse._ArgumentGroup) -> None:
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
        type=value(float, lambda size: 0 < size < inf, "not a size above 0 in GiB"),
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


def value(
    kind: type, is_valid: Callable[[Any], bool], problem: str, accepted: str | None = None
) -> Callable[[str], Any]:
    """An argparse type: text that is a valid number of the `kind`, or the word `accepted`."""

    def value_of(text: str) -> Any:
        if text == accepted:
            return text
        with suppress(ValueError):
            if is_valid(number := kind(text)):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is {problem}")

    return value_of


share_or_auto = value(float, lambda share: 0 <= share <= 1, "neither a fraction from 0 to 1 nor 'auto'", AUTO)


def _add_removed_arguments(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Add the flags of old launch scripts that Megatron lacks, hidden from --help."""
    for flag, (num_values, _) in _REMOVED.items():
        if flag not in parser._option_string_actions:
            group.add_argument(
                flag,
                action=_Removed,
                nargs=num_values,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


class _Removed(argparse.Action):
    """Accepts a flag without effect, so that old launch scripts run, and warns once."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option == _LENGTHS:  # ignoring it would change the lengths
            raise argparse.ArgumentError(self, _REMOVED[option][1])
        warn_on_rank_0(_log, f"{option} has no effect and can be dropped: {_REMOVED[str(option)][1]}")


class _Splits(argparse.Action):
    """Records whether a spelling was used that implies equal lengths."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.means_equal_lengths = option in EQUAL_SPLITS


def _add_split_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags for where sequences are cut."""
    group.add_argument(
        "--sequence-splits",
        *EQUAL_SPLITS,
        action=_Splits,
        type=value(int, lambda number: number >= 1, "neither a number of segments nor 'auto'", AUTO),
        metavar="K",
        help="Number of segments that every sequence is cut into, or 'auto'. 4 is a good start: the bubble and the "
        "activation memory shrink with K until the segments become too short to keep the device busy. 'auto' takes the "
        "number of the shortest predicted step that fits the device's memory. Default: 1, sequences stay whole.",
    )
    group.add_argument(
        "--unit-tokens",
        type=int,
        metavar="N",
        help="Instead of a number of segments: put the sequences of a step, long and short, into units of at most N "
        "tokens. Longer ones are cut, shorter ones share a unit, padding is left out, and data-parallel ranks get "
        "equal work. For --sft and other packed documents, with --calculate-per-token-loss and --micro-batch-size 1. "
        "See docs/long-and-short.md.",
    )
    group.add_argument(
        "--sequence-split-strategy",
        "--pipe-sp-strategy",
        type=lambda name: _STRATEGY_ALIASES.get(name, name),
        choices=sorted(STRATEGIES),
        help="Where sequences are cut. Later segments attend to more tokens, so equal lengths mean unequal work, and "
        "ranks wait for each other; it shows from about 16k tokens on. 'balanced': equal forward-plus-backward time on "
        "the slowest stage, by the FLOPs of your model. Where documents are packed and stay apart, it cuts each "
        "micro-batch by its own. 'even' or 'average': equal lengths. "
        "'uniform_comp': the computation-wise partition of the Seq1F1B authors. 'terapipe': the dynamic programme of "
        "TeraPipe (arXiv 2102.07988), least time of a step; without --sequence-splits it also chooses the number of "
        "segments. 'profile': 'balanced' by the times in --sequence-split-profile. seq1f1b plan-split compares them. "
        "Default: 'balanced'; with --pipe-sp-splits 'even', as in the code of the Seq1F1B authors.",
    )
    group.add_argument(
        "--sequence-split-profile",
        type=Path,
        metavar="JSON",
        help="Times of segments measured on your hardware, for --sequence-split-strategy profile, balanced and "
        "terapipe: a trace that --pipeline-trace wrote in a short run of yours with --sequence-splits, whatever its "
        "parallelism and its layers.",
    )
    group.add_argument(
        "--sequence-split-file",
        type=Path,
        metavar="FILE",
        help="The lengths of the segments in tokens, first to last, as a JSON list or as text such as '4096 2048 "
        "2048', instead of a strategy. They must add up to --seq-length; --sequence-splits may be left out.",
    )


def parse_options(options: Mapping[str, Any]) -> argparse.Namespace:
    """Our flags as the keywords of a program: `sequence_splits=4` for `--sequence-splits 4`.

    Raises ValueError for an unknown keyword or a wrong value.
    """
    parser = add_arguments(argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False))
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        words += f"--{name.replace('_', '-')}", *map(str, values)
    try:
        parsed, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        name = (error.argument_name or "").split("/")[0].removeprefix("--").replace("-", "_")
        raise ValueError(f"{name}={options.get(name)!r}: {error.message}") from None
    if unknown:
        name = unknown[0].removeprefix("--").replace("-", "_")
        raise ValueError(f"{name} is not a keyword of megatron.seq1f1b.install; there are {', '.join(vars(parsed))}")
    return parsed


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """In place of `ArgumentParser.error`, which prints the usage, several hundred lines, on every rank."""
    unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
    known = difflib.get_close_matches(unknown, parser._option_string_actions, n=1) if unknown else []
    raise ValueError(f"{message} (did you mean {known[0]}?)" if known else f"{message}; --help lists the flags")


def has_our_flags(parser: argparse.ArgumentParser) -> bool:
    """Whether `add_arguments` was called on the parser."""
    return "--sequence-splits" in parser._option_string_actions
