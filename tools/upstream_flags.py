#!/usr/bin/env python3
"""Flags of the Megatron that Python imports which nobody has considered yet: they are not in tools/upstream_flags.txt.

A flag that touches schedules, attention or shapes gets a row in megatron/seq1f1b/arguments/unsupported; then --write
adds all of them to the file. PYTHONPATH=CHECKOUT asks a clone of Megatron-LM.
"""

import argparse
import sys
from pathlib import Path

CONSIDERED = Path(__file__).with_suffix(".txt")


def flags() -> set[str]:
    """The flags of Megatron's parser, each by its first name."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {action.option_strings[0] for action in parser._actions if action.option_strings}


def unknown() -> list[str]:
    """The flags that are not in the file."""
    return sorted(flags() - {*CONSIDERED.read_text().split()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="add them to the file")
    found = unknown()
    if parser.parse_args().write:
        CONSIDERED.write_text("\n".join(sorted({*CONSIDERED.read_text().split(), *found})) + "\n")
        return 0
    print("\n".join(found) or "All flags were considered.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
