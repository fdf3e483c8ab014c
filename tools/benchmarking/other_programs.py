"""How much of the processors other programs take while the ranks of one machine run.

Tested in tools/test_other_programs.py.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist


class Clocks(NamedTuple):
    """Seconds on a clock, and seconds of all processors together: in which they ran any program, and in which they ran
    a rank."""

    wall: float
    machine: float
    ranks: float


def read_clocks() -> Clocks:
    """The clocks when all ranks have come here."""
    ranks = torch.tensor([time.process_time()], dtype=torch.float64)
    dist.all_reduce(ranks)
    return Clocks(time.perf_counter(), busy_seconds(Path("/proc/stat").read_text()), ranks.item())


def busy_seconds(statistics: str) -> float:
    """Seconds in which processors ran programs or the kernel, by the text of /proc/stat (see proc(5)). While the kernel
    moves packets, the program that it interrupts counts as running."""
    name, user, nice, system, _, _, interrupts, soft_interrupts, *_ = statistics.split()
    assert name == "cpu"
    ticks = sum(map(int, (user, nice, system, interrupts, soft_interrupts)))
    return ticks / os.sysconf("SC_CLK_TCK")


def share_of_others(before: Clocks, after: Clocks, num_processors: int) -> float:
    """The part of all processors that programs beside the ranks took from one reading to the other."""
    others = (after.machine - before.machine) - (after.ranks - before.ranks)
    return max(0.0, others) / (num_processors * (after.wall - before.wall))
