"""Megatron on a machine without a GPU: CPU tensors, gloo, and nothing else changed.

Nothing here is active until `activate` is called. What it then redirects, and why, is written in one table, `REDIRECTS`
in redirects.py.
"""

import argparse
import logging
from collections.abc import Sequence

from ..ranks import warn_on_rank_0

_log = logging.getLogger(__name__)


def wanted(argv: Sequence[str]) -> bool:
    """Whether `argv` (without or with the program's name) means training on the CPU.

    `--device cpu` does; `--device auto`, the default, does where no GPU is visible, with a
    warning on rank 0. `--device cuda` without a GPU ends the program with one sentence.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="auto")
    device = parser.parse_known_args(argv)[0].device

    # torch must not look for GPUs here: CUDA reads CUDA_VISIBLE_DEVICES once, and `activate` sets it.
    if device == "cpu":
        return True
    import torch

    if torch.cuda.is_available():
        return False
    if device == "cuda":
        raise SystemExit("--device cuda was given, but no GPU is visible; try --device cpu.")
    # Any other value is reported by the real parser, which has the choices.
    if device == "auto":
        warn_on_rank_0(_log, "No GPU is visible: training on the CPU with gloo (--device cpu).")
    return device == "auto"


def activate() -> None:
    """Make Megatron run on CPU tensors and gloo, from now on, in this process.

    Best called before `megatron.core` is imported, whose fused functions are compiled otherwise. Calling it again does
    nothing.
    """
    # Here, since it imports torch, which takes seconds: tools that only simulate do without.
    from . import redirects

    redirects.apply()


def is_active() -> bool:
    """Whether `activate` was called in this process."""
    from . import redirects

    return redirects.is_active()
