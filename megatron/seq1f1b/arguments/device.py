"""The device that a run is for, which need not be the one at hand."""

import argparse
import os

from ..planning.costs.machine import Machine, read_machine
from ..planning.costs.step_memory import GIB


def is_on_cpu(flags: argparse.Namespace) -> bool:
    """Whether `--device` leads to the CPU on this machine."""
    import torch

    return flags.device == "cpu" or flags.device == "auto" and not torch.cuda.is_available()


def nearest_machine(flags: argparse.Namespace) -> Machine:
    """The machine of this package that is most like the run's."""
    import torch

    if is_on_cpu(flags):
        return read_machine("cpu")
    is_known = not flags.dry_run and torch.cuda.is_available()
    name = torch.cuda.get_device_name() if is_known else "A100"
    return read_machine("a100-80gb" if "A100" in name else "h100-80gb")


def device_memory(flags: argparse.Namespace) -> float:
    """Bytes that this process can have, in whole GiB so that ranks on like machines agree."""
    import torch

    if flags.dry_run:
        return flags.device_memory * GIB
    if is_on_cpu(flags):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, total // GIB) * GIB
