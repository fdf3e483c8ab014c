"""Makes Megatron's `get_forward_backward_func` return our schedule in this process, if our flags select one.

Tested in launch/test_install.py by test_a_wrong_keyword_of_a_program_is_one_sentence.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .. import rehearsal
from ..arguments import device_memory, parse_options
from ..costs.machine import bytes_outside
from ..costs.run_costs import RunCosts
from ..platform import cpu
from ..process.job_variables import check_job_variables
from ..process.megatron_versions import check_version
from ..process.net import Net
from ..process.patches import Patch, patched, rebound
from ..process.streams import prepare_streams
from .megatron_repairs import repairs
from .overlay import Overlay, installed, remember
from .validation import configured

if TYPE_CHECKING:
    from .executors import ProgramExecutor


def bind(
    flags: dict[str, Any], keep_documents_apart: bool = False, add_flags: bool = False, looks_for_gpu: bool = True
) -> None:
    """Do what `install` says. Unless this `looks_for_gpu`, Megatron moves to the CPU with `device="cpu"` only."""
    keywords = dict(flags)
    if keep_documents_apart:
        keywords["keep_documents_apart"] = True
    before = installed()
    if before is not None:
        if keywords and keywords != before.keywords:
            raise ValueError("install was called before with other keywords; call it once, or uninstall in between")
        return
    if keywords:
        _bind_to_program(parse_options(flags), keywords, keep_documents_apart, looks_for_gpu)
    else:
        _bind_to_script(add_flags, looks_for_gpu)


def _bind_to_script(add_flags: bool, looks_for_gpu: bool) -> None:
    """Bind an overlay for a script with Megatron's arguments, which `validate` gives its configuration."""
    words = sys.argv[1:]
    is_rehearsal = "--dry-run" in words
    net = Net()
    patches = ExitStack()
    _catch_failures(net, patches, is_rehearsal)
    if is_rehearsal or (looks_for_gpu and cpu.wanted(words)):
        _move_to_cpu()
    version = _megatron_version()
    upstream = _megatrons_choice()
    rows = repairs(version)
    overlay = Overlay(upstream, patches)
    rows += overlay.patches_of_scripts(net, add_flags)
    _lay_over(upstream, overlay, rows)
    if is_rehearsal:
        patches.enter_context(patched(rehearsal.patches(overlay.rehearse_in, bytes_outside, device_memory)))


def _bind_to_program(
    options: Namespace, keywords: dict[str, Any], keep_documents_apart: bool, looks_for_gpu: bool
) -> None:
    """Bind an overlay for a program without Megatron's arguments, with our parsed flags as `options`."""
    if options.device == "cpu" or (looks_for_gpu and cpu.wanted(["--device", options.device])):
        _move_to_cpu()
    version = _megatron_version()
    upstream = _megatrons_choice()
    rows = repairs(version)
    overlay = Overlay(upstream, ExitStack(), keywords, _executor_of_program(options, keep_documents_apart))
    if options.partition_state:
        from ..runtime.gradients import partition_patches

        rows += partition_patches.patches()
    _lay_over(upstream, overlay, rows)


def _catch_failures(net: Net, patches: ExitStack, is_rehearsal: bool) -> None:
    """Hold the net under a script until `patches` end, and join its other ranks, which a rehearsal does without."""
    prepare_streams()
    hook = Patch("sys.excepthook", net.caught, "prints a traceback on every rank that fails")
    patches.enter_context(patched([hook]))
    if is_rehearsal:
        rehearsal.prepare(os.environ)
    check_job_variables(os.environ, sys.argv[1:])
    if not is_rehearsal:
        net.connect()


def _megatron_version() -> str:
    """The version of megatron-core. Raises ImportError for an old one."""
    from megatron.core import package_info

    version = package_info.__version__.split("+")[0]  # without a commit, which is that of the repository around it
    check_version(version)
    return version


def _megatrons_choice() -> Callable:
    """Megatron's function that chooses a schedule; its module is imported once Megatron may be on the CPU."""
    from megatron.core.pipeline_parallel import schedules

    return schedules.get_forward_backward_func


def _lay_over(upstream: Callable, overlay: Overlay, rows: list[Patch]) -> None:
    """Bind the patches, and our choice of a schedule where modules have `upstream`, Megatron's, until the patches of
    the overlay end."""
    patches = overlay.patches
    ours = overlay.get_forward_backward_func
    patches.enter_context(patched(rows))
    patches.enter_context(rebound(upstream, ours))
    patches.callback(rebound, ours, upstream)  # in modules that import it from now on
    remember(overlay)
    patches.callback(remember, None)


def _executor_of_program(options: Namespace, keep_documents_apart: bool) -> ProgramExecutor:
    """The executor of a program with these `options`, of 1F1B if they name no schedule."""
    from .executors import ProgramExecutor  # imports torch and Megatron

    if options.pipeline_schedule is None and options.pipeline_schedule_file is None:
        options.pipeline_schedule = "1f1b"
    return ProgramExecutor(lambda run: configured(RunCosts(options, run)), keep_documents_apart)


def _move_to_cpu() -> None:
    """Make Megatron run on the CPU, and suppress warnings about packages for GPUs."""
    warnings.filterwarnings("ignore", r".*(Apex|transformer-engine)", UserWarning, r"megatron\.(core|training)")
    warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
    warnings.filterwarnings("ignore", "'pin_memory' argument", UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    cpu.activate()
