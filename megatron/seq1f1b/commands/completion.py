"""Print what makes a shell complete commands, their flags and their values.

    source <(seq1f1b --print-completion bash)

docs/install.md has the line that keeps it, for each shell.
"""

# Tested in commands/test_commands.py.

from collections.abc import Sequence
from importlib import import_module

import shtab

from ..costs.machine import machine_names
from . import COMMANDS
from .parsing import Parser


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="seq1f1b --print-completion")
    shells = shtab.SUPPORTED_SHELLS
    parser.add_argument("shell", choices=shells, metavar="|".join(shells))
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    shell = make_parser().parse_args(argv).shell
    print(shtab.complete(parser_of_all(), shell))


def parser_of_all() -> Parser:
    """One parser that has those of all commands, each value with what completes it."""
    parser = Parser(None, prog="seq1f1b")
    shells = shtab.SUPPORTED_SHELLS
    parser.add_argument("--print-completion", choices=shells, help="print what makes a shell complete flags")
    parser.add_argument("--version", action="version", version="", help="print the version")
    commands = parser.add_subparsers(parser_class=Parser)
    for name, command in COMMANDS.items():
        own = import_module(f".{command.module}", __package__).make_parser()
        _mark_values(own)
        purpose = command.purpose
        commands.add_parser(name, description=purpose, help=purpose, parents=[own], add_help=False)
    return parser


def _mark_values(parser: Parser) -> None:
    """Say what completes the values of a command's flags: the metavar tells files from folders."""
    for action in parser._actions:
        metavar = str(action.metavar)
        if action.dest == "machine":
            action.choices = machine_names()  # files of one's own are to be typed
        elif metavar.startswith("FILE") or metavar in ("PATH", "PREFIX"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
