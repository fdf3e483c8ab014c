"""Makes Megatron's `get_forward_backward_func` return our schedule in this process, if our flags select one."""

import logging
import os
import sys
import warnings
from argparse import Namespace
from contextlib import ExitStack
from typing import Any

from .. import rehearsal
from ..arguments import PipelineConfig, parse_options
from ..costs.machine import bytes_outside
from ..platform import cpu
from ..process.megatron_versions import check_version
from ..process.net import Net
from ..process.patches import Patch, patched, rebound
from . import environment
from .overlay import Overlay, installed, patches_of_megatron, remember
from .validation import validated


def install(add_flags: bool = False, keep_documents_apart: bool = False, **flags: Any) -> None:
    """Make Megatron in this process run our schedules; best called before a program imports Megatron. A second call
    does nothing. Raises ValueError for unknown keywords, or others than before, and ImportError for an old Megatron.

    A script with Megatron's arguments adds our flags to its parser and calls `validate`. With `add_flags` this happens
    in every script that has Megatron parse its arguments and calls `pretrain`. With `--dry-run` it rehearses.

    A program without megatron.training passes our `flags` as keywords: `install(sequence_splits=4)`. Megatron's
    `get_forward_backward_func` then returns our schedule (1f1b if none is named); its first step raises ValueError for
    what is unsupported. With `pipeline_placement="v"` rank r of P holds the stages r and 2P-1-r as its chunks. With
    `keep_documents_apart` no token sees another document of its sequence (docs/library.md).

    Without a GPU, or with `--device cpu`, Megatron moves to the CPU.
    """
    environment.stop_watching()  # the program decides
    bind(flags, keep_documents_apart, add_flags)


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
    options = parse_options(flags) if keywords else None  # None for a script with Megatron's arguments
    is_rehearsal = options is None and "--dry-run" in sys.argv[1:]
    net = Net()
    patches = ExitStack()
    if options is None:
        hook = Patch("sys.excepthook", net.caught, "prints a traceback on every rank that fails")
        patches.enter_context(patched([hook]))
        if is_rehearsal:
            rehearsal.prepare(os.environ)
        else:
            net.connect()
    if is_rehearsal or _wants_cpu(options, looks_for_gpu):
        _silence_imports()
        cpu.activate()
    from megatron.core import package_info
    from megatron.core.pipeline_parallel import schedules

    version = package_info.__version__.split("+")[0]  # without a commit, which is that of the repository around it
    check_version(version)
    upstream = schedules.get_forward_backward_func
    overlay = Overlay(upstream, patches, keywords)
    rows = patches_of_megatron(version)
    if options is None:
        rows += overlay.patches_of_scripts(net, add_flags)
    else:
        rows += overlay.patches_of_programs(options, keep_documents_apart)
    patches.enter_context(patched(rows))
    ours = overlay.get_forward_backward_func
    patches.enter_context(rebound(upstream, ours))
    patches.callback(rebound, ours, upstream)  # in modules that import it from now on
    remember(overlay)
    patches.callback(remember, None)
    if is_rehearsal:
        patches.enter_context(patched(rehearsal.patches(overlay.rehearse_in, bytes_outside)))


def _wants_cpu(options: Namespace | None, looks_for_gpu: bool) -> bool:
    """Whether a program with these `options`, or the script of this command line, trains on the CPU."""
    if looks_for_gpu:
        return cpu.wanted(sys.argv[1:] if options is None else ["--device", options.device])
    return options is not None and options.device == "cpu"


def _silence_imports() -> None:
    """Suppress warnings about packages for GPUs."""
    warnings.filterwarnings("ignore", r".*(Apex|transformer-engine)", UserWarning, r"megatron\.(core|training)")
    warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
    warnings.filterwarnings("ignore", "'pin_memory' argument", UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def uninstall() -> None:
    """Undo `install`; without it, do nothing. If Megatron runs on the CPU, it stays there."""
    overlay = installed()
    if overlay is not None:
        overlay.patches.close()


def validate(args: Namespace) -> PipelineConfig:
    """The configuration of the parsed arguments, Megatron's and ours; raises ValueError for what is unsupported."""
    config = validated(args)
    overlay = installed()
    if overlay is not None:
        overlay.use(config)
    return config


def pipeline_config() -> PipelineConfig:
    """The configuration of this process, as `validate` returned it. Raises ValueError before `install`."""
    overlay = installed()
    if overlay is None:
        raise ValueError("the script must call megatron.seq1f1b.install before it asks for the configuration")
    return overlay.pipeline_config()
