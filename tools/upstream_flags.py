#!/usr/bin/env python3
"""Flags of the Megatron that Python imports which nobody has considered yet: they are not in
megatron/seq1f1b/commands/megatron_flags.csv, by which `seq1f1b plan` knows how many values each takes.

A flag that touches schedules, attention or shapes gets a row in megatron/seq1f1b/arguments/unsupported; then --write
adds all of them to the file. PYTHONPATH=CHECKOUT asks a clone of Megatron-LM.
"""

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path

CONSIDERED = Path(__file__).parents[1] / "megatron" / "seq1f1b" / "commands" / "megatron_flags.csv"
NAMES = ["flag", "values"]


def flags() -> dict[str, str]:
    """The flags of Megatron's parser, in all spellings, each with the number of its values as argparse has it."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = {}
    for action in parser._actions:
        values = "1" if action.nargs is None else str(action.nargs)
        for flag in action.option_strings:
            found[flag] = values
    return {flag: values for flag, values in found.items() if flag.startswith("--")}


def considered() -> dict[str, str]:
    """The flags of the file; the number of values is empty where it is not known."""
    with CONSIDERED.open(newline="") as file:
        return {row["flag"]: row["values"] for row in csv.DictReader(file)}


def unknown() -> list[str]:
    """The flags that are not in the file."""
    return sorted(flags().keys() - considered().keys())


def write(known: Mapping[str, str]) -> None:
    with CONSIDERED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(NAMES)
        writer.writerows(sorted(known.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="add them to the file")
    if parser.parse_args().write:
        write(considered() | flags())
        return 0
    found = unknown()
    print("\n".join(found) or "All flags were considered.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
