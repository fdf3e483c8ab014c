"""Megatron on a machine without a GPU, once `activate` is called: one table, `REDIRECTS`, has all that is changed.

Tested in functional_tests/test_cpu_activation.py by test_a_visible_gpu_is_used_unless_the_flag_is_cpu.
"""

import argparse
from collections.abc import Sequence

from ..process.ranks import warn_on_rank_0


def wanted(argv: Sequence[str]) -> bool:
    """Whether a command line selects training on the CPU: `--device cpu`, or no GPU is visible, which rank 0 logs.
    Raises ValueError for `--device cuda` without a GPU."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="auto")
    device = parser.parse_known_args(argv)[0].device
    if device == "cpu":  # torch must not look for GPUs: CUDA reads CUDA_VISIBLE_DEVICES once, and `activate` sets it
        return True
    import torch

    if torch.cuda.is_available():
        return False
    if device == "cuda":
        raise ValueError("--device cuda was given, but no GPU is visible; try --device cpu")
    if device == "auto":  # the real parser reports any other value
        warn_on_rank_0("No GPU is visible: training on the CPU with gloo (--device cpu).")
    return device == "auto"


def activate() -> None:
    """Make Megatron run on CPU tensors and gloo from now on; best before it is imported, which compiles functions."""
    if not is_active():
        from . import redirects  # imports torch, which takes seconds

        redirects.apply()


def is_active() -> bool:
    import torch

    from .stand_ins import current_device

    return torch.cuda.current_device is current_device
