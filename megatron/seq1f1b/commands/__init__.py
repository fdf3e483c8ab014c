"""The subcommands of `seq1f1b`, for work beside training.

A command is a module here with `make_parser()` and `main(argv) -> int | None`, and a line in COMMANDS. It is imported
when it runs, or when completion asks for its flags.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from errno import ENOSPC
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..process.flag_names import values_by_flag
from ..process.near_names import did_you_mean
from ..process.sentences import say, sentence_of
from ..process.streams import prepare_streams


class Subcommand(NamedTuple):
    """A module of this folder, and what its command does, in a few words."""

    module: str
    purpose: str


COMMANDS: Mapping[str, Subcommand] = MappingProxyType(
    {
        "plot": Subcommand("plot", "draw a schedule or measured timelines, or write them as JSON, CSV or for Perfetto"),
        "check": Subcommand("check", "check a schedule file before training with it"),
        "plan": Subcommand("plan", "find the fastest configuration that fits a cluster"),
        "gain-map": Subcommand("gain_map", "find where segments pay, by network, number of GPUs and batch"),
        "train-time": Subcommand("train_time", "find how soon a model can be trained, by the number of GPUs"),
        "plan-split": Subcommand("plan_split", "compare where sequences can be cut, for a model of your size"),
        "enable": Subcommand(
            "enable", "let programs run on segments by the variable SEQ1F1B, without a change of their code"
        ),
        "compare": Subcommand("compare", "lay training runs side by side"),
        "profile": Subcommand("profile", "measure this machine, for predictions of plan"),
        "preprocess": Subcommand("preprocess", "turn text into the .bin/.idx pair that Megatron trains on"),
    }
)

_COLLECTED_AFTER = 200_000  # new objects


def main(argv: Sequence[str] | None = None) -> int:
    """The console command `seq1f1b COMMAND ...`; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return _exit_code(lambda: _run_command(words), words)


def _run_command(words: list[str]) -> int | None:
    """Run the command that is the first of these words of the command line; the others stay."""
    if words and words[0] == "help":  # as git has it: `help plan` is `plan --help`
        words = [*words[1:2], "--help"]
    if not words:
        print(_usage(), file=sys.stderr)
        return 2
    if words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name = words.pop(0)
    if name == "--version":
        print(f"seq1f1b {version('megatron-seq1f1b')}")
        return 0
    if name == "--print-completion":
        return _module("completion").main(words)
    if name not in COMMANDS:
        way_out = did_you_mean(name, [*COMMANDS, "--help", "--version"]) or f"it has {', '.join(COMMANDS)}"
        say(f"seq1f1b has no command {name!r}; {way_out}")
        return 2
    sys.argv[0] = f"seq1f1b {name}"  # for --help
    return _module(COMMANDS[name].module).main(words)


def _usage() -> str:
    """All commands, a line for each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: seq1f1b COMMAND ...",
            "",
            *lines,
            "",
            "seq1f1b COMMAND --help explains its options, seq1f1b --version names the version.",
            "seq1f1b --print-completion bash makes the shell complete them; docs/install.md has the line for yours.",
        ]
    )


def run(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A mistake of the user becomes one sentence and the code 2."""
    words = sys.argv[1:] if argv is None else argv
    return _exit_code(lambda: _module(COMMANDS[name].module).main(argv), words)


def _module(name: str) -> Any:
    return import_module(f".{name}", __name__)


def _exit_code(command: Callable[[], int | None], words: Sequence[str]) -> int:
    """The exit code of a command with these words; whatever goes wrong becomes a sentence."""
    prepare_streams()
    # A plan makes millions of actions, none of them in a cycle: to look for those would take half of its time.
    gc.set_threshold(_COLLECTED_AFTER)
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the pipe has closed it, as in `seq1f1b plan-split | head`
        _drop_output()
        return 1
    except (Exception, KeyboardInterrupt) as error:
        is_plain = isinstance(error, (OSError, ValueError, ModuleNotFoundError, KeyboardInterrupt))
        if isinstance(error, OSError) and error.errno == ENOSPC and error.filename is None:  # all files are named
            _drop_output()
            error = ValueError(f"the output: {error.strerror}")
        sentence = _with_flag(sentence_of(error), words)
        say(sentence, None if is_plain else "".join(traceback.format_exception(error)))
        return 130 if isinstance(error, KeyboardInterrupt) else 2


def _with_flag(sentence: str, words: Sequence[str]) -> str:
    """A sentence about a file with the flag, among these words of the command line, that names the file."""
    for flag, path in values_by_flag(words):
        if flag and path and sentence.startswith((f"{path}:", f"{Path(path)}:")):
            return f"{flag} {sentence}"
    return sentence


def _drop_output() -> None:
    """Drop further output; else Python would fail once more at its end, where it flushes what is left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
