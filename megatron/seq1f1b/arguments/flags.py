"""Our command-line flags; docs/flags.md describes them at length.

Tested in arguments/test_config.py.
"""

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial, wraps
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from ..partition import STRATEGIES
from ..process.flag_names import flag_of
from ..process.near_names import did_you_mean
from ..process.ranks import warn_on_rank_0
from ..schedule import FAMILY_NAMES, PLACEMENTS, splitting_families

# The value of a flag for which we choose the best value.
AUTO = "auto"

# Values of flags that are not given.
DEVICE_MEMORY = 80.0  # GiB
TRACED_ITERATIONS = (3,)

# Flags that have no effect without another one; those of Megatron are unknown to programs.
_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "device_memory": "dry_run",
        "dry_run_output": "dry_run",
        "pipeline_trace_iterations": "pipeline_trace",
        "window_attn_skip_freq": "window_size",
    }
)

# Schedules by their names in papers, without dashes, and how they are called here; docs/schedules.md has more.
_NAMES_FROM_PAPERS = MappingProxyType(
    {
        "seq1f1b": "that is 1f1b with --sequence-splits",
        "interleaved": "that is 1f1b with several model chunks",
        "interleaved1f1b": "that is 1f1b with several model chunks",
        "terapipe": "that is gpipe with --sequence-splits and --sequence-split-strategy terapipe",
        "zbv": "that is auto with two model chunks and --pipeline-placement v",
    }
)

# Flags of the authors' Megatron and of Megatron-LM's pull request 3116: those that mean equal lengths by default, and
# those that Megatron lacks.
EQUAL_SPLITS = ("--pipe-sp-splits", "--chunked-pipeline-model-parallel-splits")
_REMOVED = (
    "--DDP-impl",
    "--data-impl",
    "--moe-load-balancing-loss-mode-for-chunked-sequence",
    "--no-async-tensor-model-parallel-allreduce",
)
# One of that pull request whose values have another form here.
_LENGTHS_OF_SPLITS = "--chunked-pipeline-model-parallel-split-lengths"


def number_type(
    kind: type, is_valid: Callable[[Any], bool], problem: str, accepted: str | None = None
) -> Callable[[str], Any]:
    """An argparse type: text that is a valid number of the `kind`, or the word `accepted`."""

    def value_of(text: str) -> Any:
        if text == accepted:
            return text
        with suppress(ValueError):
            number = kind(text)
            if is_valid(number):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is {problem}{_in_digits(text, kind)}")

    return value_of


# What units behind a number stand for: in whole numbers, which are sizes of a model, and in others, which are in GB
# where they count bytes.
_UNITS_OF_SIZES = MappingProxyType({"k": 2**10, "m": 2**20})
_UNITS_OF_AMOUNTS = MappingProxyType(
    {"%": 0.01, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "gb": 1.0, "gib": 1.0, "gb/s": 1.0}
)


def _in_digits(text: str, kind: type) -> str:
    """The number that `8k`, `1e3`, `8,192` or `4.0` stands for where it is whole, `2T`, `80GiB` or `50%` elsewhere, as
    a question; empty for all else."""
    meant = _meant_size(text) if kind is int else _meant_amount(text)
    return f" (did you mean {meant}?)" if meant else ""


def _meant_size(text: str) -> str:
    if match := re.fullmatch("([0-9]+)([km])", text, re.IGNORECASE):
        return str(int(match[1]) * _UNITS_OF_SIZES[match[2].lower()])
    if re.fullmatch("[0-9]{1,3}(,[0-9]{3})+", text):
        return text.replace(",", "")
    if re.fullmatch(r"[0-9.]+e[0-9]|[0-9]+\.0*", text, re.IGNORECASE) and float(text).is_integer():
        return f"{float(text):.0f}"
    return ""


def _meant_amount(text: str) -> str:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([a-z/]+|%)", text, re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS_OF_AMOUNTS:
        return ""
    return f"{float(match[1]) * _UNITS_OF_AMOUNTS[match[2].lower()]:g}"


def given_path(text: str) -> Path:
    """An argparse type: the path of a file or folder. An empty one, as of a variable of the shell that is not set,
    would be the folder in which the program runs."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty; drop the flag, or name a file or folder")
    return Path(text)


share_or_auto = number_type(float, lambda share: 0 <= share <= 1, "neither a fraction from 0 to 1 nor 'auto'", AUTO)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser; an `extra_args_provider`."""
    group = parser.add_argument_group(
        "sequence-level pipeline parallelism",
        "Segments of sequences, for smaller bubbles and less memory; docs/flags.md has more on each of these flags.",
    )
    _add_flags_of_schedules(group.add_argument)
    _add_flags_of_cuts(group.add_argument)
    _add_flags_of_memory(group.add_argument)
    group.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="'auto' takes a GPU if there is one."
    )
    _add_flags_of_traces(group.add_argument)
    _add_flags_of_rehearsals(group.add_argument)
    parser.set_defaults(means_equal_lengths=False)
    _add_removed_flags(group.add_argument, known=parser._option_string_actions)
    for action in parser._actions:
        if action.help is not None:  # Megatron 0.19 has a bare percent sign in a help text, so --help fails
            action.help = re.sub(r"(?<!%)%(?![%(])", "%%", action.help)
        if action.dest == "yaml_cfg":
            action.type = _refuse_yaml
        if callable(action.type) and not isinstance(action.type, type):
            action.type = _with_errors_of_flags(action)
    parser.error = partial(refuse, parser)  # type: ignore[method-assign]
    return parser


def _refuse_yaml(file: str) -> NoReturn:
    """The type of --yaml-cfg, which leaves a run without our flags, and with few of Megatron's."""
    raise argparse.ArgumentTypeError(
        f"with {file} Megatron reads no flag of the command line, and so none of ours; write its settings as flags"
    )


def _with_errors_of_flags(action: argparse.Action) -> Callable[[str], Any]:
    """The type of a flag, whose errors all become those of the flag: argparse names it for some kinds only, and not for
    the KeyError of a name that an enumeration lacks, or for the SyntaxError of a pattern that Megatron evaluates."""
    convert: Any = action.type

    @wraps(convert)  # argparse shows its name
    def value_of(text: str) -> Any:
        try:
            return convert(text)
        except (argparse.ArgumentTypeError, TypeError, ValueError):
            raise
        except Exception as error:
            known = [choice.name for choice in action.choices or () if isinstance(choice, Enum)]
            names = did_you_mean(text, known) or f"the names are {', '.join(known)}"
            way_out = names if known else f"{type(error).__name__}: {error}".rstrip(": ")
            raise argparse.ArgumentTypeError(f"invalid value: {text!r} ({way_out})") from None

    return value_of


def _add_flags_of_schedules(add: Callable[..., Any]) -> None:
    add(
        "--pipeline-schedule",
        choices=sorted(FAMILY_NAMES),
        help=f"Order of forwards and backwards, by default 1f1b; {' and '.join(splitting_families())} split backwards.",
    )
    add(
        "--pipeline-schedule-file",
        type=given_path,
        metavar="FILE.csv",
        help="A schedule: a row for each pipeline rank, an action such as 2F3.1 (stage, micro-batch, segment) in each "
        "cell.",
    )
    add(
        "--pipeline-placement",
        choices=PLACEMENTS,
        default="looped",
        help="How model chunks lie in the depth: 'looped' as Megatron's, or in a 'v', where every second one runs "
        "back.",
    )


def _add_flags_of_cuts(add: Callable[..., Any]) -> None:
    count = number_type(int, lambda number: number >= 1, "neither a number of segments nor 'auto'", AUTO)
    tokens = number_type(int, lambda number: number >= 1, "no number of tokens")
    add(
        "--sequence-splits",
        *EQUAL_SPLITS,
        action=_Splits,
        type=count,
        metavar="K",
        help="Number of segments of every sequence; 'auto' picks that with the shortest predicted step that fits.",
    )
    add(
        "--segment-tokens",
        type=tokens,
        metavar="N",
        help="Instead: segments of at most N tokens, as many as each micro-batch needs, for sequences of any length.",
    )
    add(
        "--unit-tokens",
        type=tokens,
        metavar="N",
        help="Instead: put the sequences of a step, long and short, into units of at most N tokens.",
    )
    add(
        "--sequence-split-strategy",
        "--pipe-sp-strategy",
        type=lambda name: {"average": "even"}.get(name, name),  # the name of the authors of Seq1F1B
        choices=sorted(STRATEGIES),
        help="Where sequences are cut: into equal times ('balanced', the default), equal lengths ('even', 'average'), "
        "as the Seq1F1B authors do ('uniform_comp'), for the shortest step ('terapipe'), or by a 'profile'.",
    )
    add(
        "--sequence-split-profile",
        type=given_path,
        metavar="FILE.json",
        help="Times of segments for 'profile', 'balanced' and 'terapipe': what --pipeline-trace wrote in a short run.",
    )
    add(
        "--sequence-split-file",
        type=given_path,
        metavar="FILE",
        help="Lengths of the segments, as a JSON list or as text such as '4096 2048 2048'.",
    )


def _add_flags_of_memory(add: Callable[..., Any]) -> None:
    layers = number_type(int, lambda number: number >= 0, "no number of layers")
    add(
        "--recompute-keeps-attention",
        action="store_true",
        help="With --recompute-granularity full, recompute all of a layer but its attention.",
    )
    add(
        "--offload-activations",
        type=share_or_auto,
        default=0.0,
        metavar="FRACTION",
        help="Share of a rank's activations that waits in the memory of its host; 'auto': the least that fits.",
    )
    add(
        "--offload-layers-leaving",
        type=layers,
        default=0,
        metavar="N",
        help="Layers of a unit leave one by one; at its end a layer waits until at most N leave. 0: units leave as a "
        "whole.",
    )
    add("--keep-logits", action="store_true", help="Keep the logits of the last stage, however many, for the backward.")
    add(
        "--partition-state",
        action="store_true",
        help="With --use-distributed-optimizer, data-parallel ranks keep shares of weights and gradients, too.",
    )


def _add_flags_of_traces(add: Callable[..., Any]) -> None:
    iteration = number_type(int, lambda number: number >= 1, "no iteration, which are counted from 1")
    add(
        "--pipeline-trace",
        type=given_path,
        metavar="DIR",
        help="Write when each action ran, and the peak memory of each rank, to DIR; seq1f1b plot draws it.",
    )
    add(
        "--pipeline-trace-iterations",
        type=iteration,
        nargs="+",
        metavar="N",
        help=f"Iterations to trace, counted from 1. Default: {' '.join(map(str, TRACED_ITERATIONS))}.",
    )


def _add_flags_of_rehearsals(add: Callable[..., Any]) -> None:
    size = number_type(float, lambda size: 0 < size < inf, "not a size above 0 in GiB")
    add("--dry-run", action="store_true", help="Rehearse the launch on this machine, without GPUs.")
    add(
        "--device-memory",
        type=size,
        metavar="GIB",
        help=f"Memory of a GPU that --dry-run compares with. Default: {DEVICE_MEMORY:g}.",
    )
    add("--dry-run-output", type=given_path, metavar="DIR", help="Write what --dry-run finds to DIR, with a picture.")


def _add_removed_flags(add: Callable[..., Any], known: Collection[str]) -> None:
    """Accept the flags of old launch scripts that this Megatron does not know, or say what takes their values; help
    does not list them."""
    actions: dict[str, type[argparse.Action]] = dict.fromkeys(_REMOVED, _Removed)
    actions[_LENGTHS_OF_SPLITS] = _LengthsOfSplits
    for flag, action in actions.items():
        if flag not in known:
            add(
                flag,
                action=action,
                nargs="*",
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


class _LengthsOfSplits(argparse.Action):
    """Refuses lengths on the command line with what takes them."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        raise argparse.ArgumentError(
            None, f"{option}: put the lengths into a file, and give it to --sequence-split-file"
        )


class _Removed(argparse.Action):
    """Accepts a flag without effect, so that old launch scripts run, and warns once."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        warn_on_rank_0(f"{option} has no effect and can be dropped: Megatron lacks it")


class _Splits(argparse.Action):
    """Records whether a spelling was used that implies equal lengths. Of one spelling the last value counts, as of any
    flag; two spellings may not contradict each other."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest, None)
        means_equal_lengths = option in EQUAL_SPLITS
        if before not in (None, values) and namespace.means_equal_lengths != means_equal_lengths:
            spellings = ", ".join(self.option_strings)
            raise argparse.ArgumentError(
                None, f"{option} {values} contradicts the {before} of another spelling ({spellings}); drop one"
            )
        setattr(namespace, self.dest, values)
        namespace.means_equal_lengths = means_equal_lengths


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Replaces `ArgumentParser.error`, which prints the usage, several hundred lines, on every rank."""
    near = ""
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        if not unknown:
            raise ValueError("an argument is empty; is a variable of the shell not set?")
        near = did_you_mean(unknown, parser._option_string_actions) or _behind(unknown)
        if not near:
            message += f"; {parser.prog} --help lists the flags"
    elif number := re.search(r"invalid (int|float) value: '(.+)'$", message):
        message += _in_digits(number[2], int if number[1] == "int" else float)
    elif "ignored explicit argument" in message:
        near = "it takes no value; drop that"
    elif choice := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
        near = did_you_mean(choice[1], re.findall(r"[^', ]+", choice[2]))
        if message.startswith("argument --pipeline-schedule:"):
            near = _NAMES_FROM_PAPERS.get(choice[1].lower().replace("-", ""), near)
    raise ValueError(f"{message} ({near})" if near else message)


def _behind(word: str) -> str:
    """Where the first such word of the command line stands that belongs to no flag: behind which flag and its value;
    empty if it is itself a flag, or if there is none."""
    words = sys.argv[1:]
    if word.startswith("-") or word not in words:
        return ""
    before = words[: words.index(word)]
    flags = [place for place, earlier in enumerate(before) if earlier.startswith("--")]
    return f"behind {' '.join(before[flags[-1] :])}" if flags else ""


def check_needed(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that has no effect without another one, which is not given."""
    for name, needed in _NEEDED.items():
        if getattr(args, name, None) is not None and not getattr(args, needed):
            raise ValueError(f"{flag_of(name)} needs {flag_of(needed)}; add that, or drop it")


def parse_options(options: Mapping[str, Any]) -> argparse.Namespace:
    """Our flags, given as keywords (`sequence_splits=4` for `--sequence-splits 4`); raises ValueError."""
    words: list[str] = []
    for name, given in options.items():
        words.append(flag_of(name))
        if isinstance(given, (list, tuple)):
            words += map(str, given)
        elif given is not True:
            words.append(str(given))
    parsed = add_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False)).parse_args(words)
    if parsed.dry_run:
        raise ValueError("--dry-run rehearses scripts with Megatron's arguments, which this program lacks; drop it")
    check_needed(parsed)
    return parsed
