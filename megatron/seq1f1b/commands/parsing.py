"""How commands read their flags and files; an error is one sentence.

Tested in commands/test_bad_input.py by test_one_sentence.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..arguments.flags import number_type, refuse
from ..process.flag_names import values_by_flag

# Endings of the pictures that matplotlib draws.
PICTURES = (".png", ".svg", ".pdf")
# No model is deeper. Predictions loop over layers.
MOST_LAYERS = 10_000
# No step has more sequences.
MOST_SEQUENCES = 2**16


class Parser(argparse.ArgumentParser):
    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # each flag has one spelling
            **options,
        )

    error = refuse

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # which `parse_args` calls, too
        self._refuse_empty(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def _refuse_empty(self, words: Sequence[str]) -> None:
        """Refuse an empty value, as of a variable of the shell that is not set. As a path it would be the folder in
        which the command runs."""
        for flag, value in values_by_flag(words):
            if not value.strip():
                place = f"{flag} has an empty value; drop the flag, or give it one" if flag else "a word is empty"
                self.error(f"{place} (is a variable of the shell not set?)")

    @property
    def flags(self) -> list[str]:
        """All spellings of the flags that it reads."""
        return list(self._option_string_actions)

    def refuse_stray(
        self,
        argv: Sequence[str] | None,
        *others: argparse.ArgumentParser,
        most_values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Refuse a word that is no value of the flag before it, which `parse_known_args` would let pass. Flags are
        those of this parser, of `others`, and of `most_values`, which has how many may follow; one that none of them
        knows may have any number of values. Without `argv` words are those of the command line."""
        known = dict(most_values)
        for parser in (*others, self):
            for name, action in parser._option_string_actions.items():
                known[name] = values_of(action.nargs)
        most = 0.0  # values that may follow
        flag = ""
        for word in sys.argv[1:] if argv is None else argv:
            if word.startswith("--") and word != "--":
                flag, is_joined, _ = word.partition("=")
                most = 0.0 if is_joined else known.get(flag, inf)
            elif most < 1 or word == "--":
                behind = f"behind {flag} " if flag else ""
                self.error(f"the word {word!r} {behind}is the value of no flag; drop it, or name its flag")
            else:
                most -= 1

    def add_machine(self, default: str) -> None:
        """Add --machine, the machine of a prediction."""
        from ..costs.machine import machine_names  # imports numpy, which most commands do without

        names = ", ".join(machine_names())
        self.add_argument("--machine", default=default, help=f"{names}, or your own file; default: {default}")

    def add_workers(self, work: str, most: int | None = None) -> None:
        """Add --workers, the processes that do some work: by default one for each core that the command may use, but no
        more than `most`."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        default = cores if most is None else min(cores, most)
        limit = "" if most is None else f", {most} at most"
        what = f"processes that {work}; default: one a core{limit}"
        self.add_argument("--workers", type=count_up_to(max(64, 4 * cores)), default=default, metavar="N", help=what)


def values_of(nargs: str | int | None) -> float:
    """How many values may follow a flag with this number of them in the form of argparse."""
    if nargs in ("+", "*"):
        return inf
    return 1.0 if nargs in (None, "?") else float(nargs)


# The types of flags that count or measure something. No size of a model or of a step is larger.
count = number_type(int, lambda number: 1 <= number <= 10**9, "not a whole number from 1 to 1,000,000,000")
# Of a sequence: positions at which it may be cut are listed.
sequence_length = number_type(int, lambda number: 1 <= number <= 10**8, "not a whole number from 1 to 100,000,000")
amount = number_type(float, lambda number: 0 < number < inf, "not a number above 0")
amount_or_0 = number_type(float, lambda number: 0 <= number < inf, "not a number from 0 on")


def count_up_to(most: int) -> Callable[[str], Any]:
    return number_type(int, lambda number: 1 <= number <= most, f"not a whole number from 1 to {most:,}")


def with_values(words: Sequence[str]) -> list[str]:
    """Words of a command line as flags, each with its values, quoted for a shell."""
    flags: list[str] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append(shlex.quote(word))
        else:
            flags[-1] += f" {shlex.quote(word)}"
    return flags


def name_of(flag: str) -> str:
    """The name of a flag with its values."""
    return shlex.split(flag)[0].partition("=")[0]


def output_path(*endings: str) -> Callable[[str], Path]:
    """The type of an --output: a path with one of these endings that can be written, tried before any work is done."""

    def path_of(text: str) -> Path:
        path = Path(text)
        if not path.name.endswith(endings) or path.name in endings:
            raise argparse.ArgumentTypeError(f"{path}: expected a name that ends in {', '.join(endings)}")
        is_new = not path.exists()
        if not is_new and not path.is_file():  # a file would take its place; to open a pipe may take for ever
            raise argparse.ArgumentTypeError(f"{path} cannot be written (it is no file); name another")
        try:
            path.open("ab").close()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror}); name another") from None
        if is_new:
            # What a link points to, not the link. Another rank that tries the same name may have removed it already.
            path.resolve().unlink(missing_ok=True)
        return path

    return path_of
