"""What scripts and programs call to run our schedules: `install`, `validate` and their like."""

from argparse import Namespace
from typing import Any

from ..arguments import PipelineConfig
from . import environment
from .bind import bind
from .overlay import installed
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
