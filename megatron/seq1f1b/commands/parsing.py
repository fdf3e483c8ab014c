"""How commands read their flags; an error is one sentence."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from ..schedule import Shape

# Endings of the pictures that matplotlib draws.
PICTURES = (".png", ".svg", ".pdf")
# No model is deeper, and predictions go through its layers one by one.
MOST_LAYERS = 10_000


class Parser(argparse.ArgumentParser):
    """A parser with the text of a module as its description."""

    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; --help lists the flags.", file=sys.stderr)
        raise SystemExit(2)


def count(text: str) -> int:
    """The type of a flag that counts something: a whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return number


def count_up_to(most: int) -> Callable[[str], int]:
    """The type of a flag that counts something, at most `most`."""

    def read(text: str) -> int:
        number = count(text)
        if number > most:
            raise argparse.ArgumentTypeError(f"'{text}' is more than {most}")
        return number

    return read


def amount(text: str) -> float:
    """The type of a flag that measures something: a finite number above 0, such as 2e12."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def amount_or_0(text: str) -> float:
    """The same, or 0."""
    return 0.0 if text == "0" else amount(text)


def with_values(words: Sequence[str]) -> list[str]:
    """Words of a command line as flags, each with its values, quoted for a shell."""
    flags: list[str] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append(shlex.quote(word))
        else:
            flags[-1] += f" {shlex.quote(word)}"
    return flags


def check_output(path: Path, *endings: str) -> None:
    """Raise ValueError for an --output that cannot be written, before any work is done."""
    if not path.name.endswith(endings):
        raise ValueError(f"--output {path}: expected a name that ends in {', '.join(endings)}")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written ({error.strerror}); give another name") from None
    if is_new:
        path.unlink()


def check_size(shape: Shape, most_actions: int) -> None:
    """Raise ValueError for a schedule of more actions, which would take minutes."""
    num_actions = 2 * shape.num_stages * shape.num_units
    if num_actions > most_actions:
        raise ValueError(
            f"these sizes make {num_actions:,} actions, the most are {most_actions:,} here; take fewer micro-batches, "
            "which repeat themselves, or fewer segments"
        )
