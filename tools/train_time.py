#!/usr/bin/env python3
"""The command `seq1f1b train-time`, for a checkout."""

import sys

from megatron.seq1f1b.commands import run

if __name__ == "__main__":
    sys.exit(run("train-time"))
