"""What goes wrong in Megatron's training loop, in words; and its log of the first iterations."""

from __future__ import annotations

import errno
import logging
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..patches import Patch
from ..ranks import warn_on_rank_0
from .checkpoint import latest_iteration
from .ending import end
from .explaining import sentence_of
from .iteration_log import IterationLog
from .places import mount_point

if TYPE_CHECKING:  # it imports Megatron, which has to wait until the CPU redirects are in place
    from ..model import Segment
    from ..runtime import Reading

_log = logging.getLogger(__name__)

# A file system with less than this is full: what failed to be written may have been larger than what is left.
_FULL = 8 << 20


class TrainingLoop:
    """Around functions of Megatron's training loop.

    `args` gives its arguments, `running` the segment of the moment, `last_step` what this rank measured.
    """

    def __init__(
        self,
        args: Callable[[], Namespace],
        running: Callable[[], Segment | None],
        last_step: Callable[[], Reading | None],
    ) -> None:
        self._args = args
        self._running = running
        self._log = IterationLog(args, last_step)

    def patches(self) -> tuple[Patch, ...]:
        """What puts the methods below in their places."""
        rows = (
            ("training_log", self.training_log, "prints as the second loss of every start the mean of two"),
            ("save_checkpoint_and_time", self.save, "fails cryptically without --save, and where the disk is full"),
            ("load_checkpoint", self.load, "fails with a traceback on every rank"),
        )
        module = "megatron.training.training"
        loop = tuple(Patch(f"{module}.{name}", partial(partial, new), why, wraps=True) for name, new, why in rows)
        validate = Patch(
            "megatron.core.rerun_state_machine.RerunStateMachine.validate_result",
            self.validates_result,
            "counts calls, but does not name the micro-batch and the segment of a loss that is not a number",
            wraps=True,
        )
        theirs = Patch(
            f"{module}.report_theoretical_memory",
            self.report_theoretical_memory,
            "counts whole micro-batches in flight, of which our schedules hold segments",
            wraps=True,
        )
        return (*loop, validate, theirs, self._log.patch())

    def training_log(
        self,
        upstream: Callable,
        losses: dict,
        total_losses: dict,
        learning_rate: float | None,
        iteration: int,
        *rest: Any,
        is_first_iteration: bool = False,
        **more: Any,
    ) -> Any:
        """Megatron prints the first iteration besides, and goes on adding up; where it ends an interval, it is one."""
        is_besides = is_first_iteration and iteration % self._args().log_interval != 0
        return upstream(losses, total_losses, learning_rate, iteration, *rest, is_first_iteration=is_besides, **more)

    def report_theoretical_memory(self, upstream: Callable) -> Callable:
        """Megatron's estimate is of its own schedules; the block at the start has that of ours."""

        def report(args: Namespace, *rest: Any, **more: Any) -> None:
            if getattr(args, "pipeline_schedule", None) is None and not getattr(args, "pipeline_schedule_file", None):
                upstream(args, *rest, **more)

        return report

    def validates_result(self, upstream: Callable) -> Callable:
        """Megatron's check of a loss, which logs what was rejected; this adds where."""

        def validate_result(machine: Any, result: Any, rejection_func: Callable, message: str, **more: Any) -> None:
            was_rejected = machine.rerun_requested
            upstream(machine, result, rejection_func, message, **more)
            segment = self._running()
            if machine.rerun_requested and not was_rejected and segment is not None:
                _log.error(
                    "%s in iteration %d: on the last stage, in micro-batch %d",
                    message,
                    self._args().curr_iteration + 1,
                    segment.microbatch,
                )

        return validate_result

    def save(self, upstream: Callable, iteration: int, *rest: Any, **more: Any) -> None:
        """Megatron's loop saves after a loss that is not a number, --save or not."""
        args = self._args()
        if args.save is None:
            warn_on_rank_0(_log, f"nothing is saved of iteration {iteration}, since --save is not given")
            return
        try:
            upstream(iteration, *rest, **more)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            folder = Path(args.save)
            last = _last_complete(folder)
            if is_full(folder, error):
                where = mount_point(folder)
                end(f"no space is left on {where} for the checkpoint of iteration {iteration}; {last}", error)
            error.add_note(f"the checkpoint of iteration {iteration} was not saved; {last}")
            raise

    def load(self, upstream: Callable, *rest: Any, **more: Any) -> Any:
        """Errors that appear only when all ranks read their parts."""
        args = self._args()
        try:
            return upstream(*rest, **more)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            folder = args.load or args.pretrained_checkpoint
            end(sentence_of(f"the checkpoint in {folder} cannot be loaded", error, None, args), error)


def is_full(folder: Path, error: BaseException) -> bool:
    """Whether a save failed because the disk is full; the errors that torch raises rarely show it."""
    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes):
        return True
    if any("No space left" in str(cause) for cause in causes):
        return True
    return shutil.disk_usage(folder).free < _FULL


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _last_complete(folder: Path) -> str:
    try:
        iteration = latest_iteration(folder)
    except ValueError:
        iteration = None
    if iteration is None:
        return "no checkpoint is complete yet"
    return f"the last complete checkpoint is of iteration {iteration}"
