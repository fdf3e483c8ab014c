#!/usr/bin/env python3
"""The runs behind a published table: one line each with the name of its log, its GPUs and its flags, by tabs.

    python tools/paper_launches.py seq1f1b_7b
    python tools/paper_launches.py seq1f1b_7b --predict

With --predict, each line has the prediction in place of the flags. scripts/paper/ runs them.
"""

import argparse
import sys

from paper.launches import TABLES, launches, predicted


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--predict", action="store_true", help="step time and memory instead of flags")
    args = parser.parse_args(argv)
    for launch in launches(args.table):
        if not args.predict:
            print(launch.log, launch.gpus, " ".join(launch.flags), sep="\t")
            continue
        seconds, memory, fits = predicted(launch)
        setup = launch.row.setup
        tokens = setup.global_batch_size * setup.sequence_length / seconds
        verdict = f"{seconds:8.3f} s {tokens:9.0f} tokens/s {memory:6.1f} GiB" if fits else "out of memory"
        published = "" if launch.row.published is None else f"  published: {launch.row.published:g} {launch.row.unit}"
        print(f"{launch.row.label:60} {launch.gpus:5} GPUs  {verdict}{published}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
