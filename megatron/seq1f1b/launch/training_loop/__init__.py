"""Wrappers of functions of Megatron's training loop: its log, checkpoints, corpora and iterations."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from ...process.patches import Patch, wrapping
from .checkpoints import Checkpoints
from .corpora import Corpora
from .log import IterationLog
from .parameter_groups import ParameterGroups
from .skipped_iterations import SkippedIterations
from .unexpected_results import UnexpectedResults


def patches(args: Callable[[], Namespace], executor: Callable[[], Any]) -> list[Patch]:
    """Each row names the fault of one of Megatron's functions. `args()` returns the arguments of the training loop,
    `executor()` the executor of our schedules."""

    def exit_silently(upstream: Callable, detector: Any, *_: Any) -> None:
        upstream(detector, None, None, None)

    straggler = "megatron.core.utils.StragglerDetector.__exit__"
    skipped = SkippedIterations(args)
    return [
        *Corpora(args).patches(),
        *IterationLog(args, executor, skipped).patches(),
        *Checkpoints(args).patches(),
        wrapping(straggler, exit_silently, "logs exceptions on every rank, too"),
        *ParameterGroups(args).patches(),
        *skipped.patches(),
        *UnexpectedResults(args).patches(),
    ]
