"""How commands read their flags: what is wrong with one is a sentence."""

import argparse
import sys
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser with the module's text as its description, whose errors are one sentence."""

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
