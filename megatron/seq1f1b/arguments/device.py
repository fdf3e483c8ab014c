"""The device of a run, which in a rehearsal is another than this machine's."""

import argparse
import os

_GIB = 2**30


def is_on_cpu(flags: argparse.Namespace) -> bool:
    """Whether `--device` leads to the CPU on this machine."""
    if flags.device != "auto":
        return bool(flags.device == "cpu")
    import torch

    return not torch.cuda.is_available()


def gpu_name(flags: argparse.Namespace) -> str:
    """The name of this machine's GPU; an A100 where the GPUs of the run are not at hand."""
    import torch

    return torch.cuda.get_device_name() if not flags.dry_run and torch.cuda.is_available() else "A100"


def device_memory(flags: argparse.Namespace) -> float:
    """Bytes that this process can have, in whole GiB so that ranks on like machines agree."""
    import torch

    if flags.dry_run:
        return float(flags.device_memory * _GIB)
    if is_on_cpu(flags):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, total // _GIB) * _GIB
