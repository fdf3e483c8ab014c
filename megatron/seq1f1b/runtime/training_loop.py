"""Wrappers of functions of Megatron's training loop."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from ..process.patches import Patch, wrapping
from ..process.ranks import end_with_parent, warn_on_rank_0
from . import corpora
from .iteration_log import print_rank_last
from .recorder import Reading

if TYPE_CHECKING:
    from .executor import PipelineExecutor

_log = logging.getLogger(__name__)


class TrainingLoop:
    """Wraps functions of Megatron's training loop; `args` gives its arguments, `executor` what runs our schedules."""

    def __init__(self, args: Callable[[], Namespace], executor: Callable[[], PipelineExecutor | None]) -> None:
        self._args = args
        self._executor = executor
        self._tokens: float | None = None  # of the last step in all replicas, without padding
        self._microbatches: float | None = None  # of a replica in that step, in the mean

    def patches(self) -> tuple[Patch, ...]:
        training = "megatron.training.training"
        rows = (
            (f"{training}.training_log", self.training_log, "averages the first two losses into the second line"),
            (
                f"{training}.print_rank_last",
                partial(print_rank_last, self._args, self._last_step, lambda: self._tokens),
                "shows neither tokens per second nor idle ranks",
            ),
            (
                f"{training}.consume_seqlen_stats_in_iteration",
                self.count_documents,
                "counts the pieces of documents that segments have, once for each model chunk",
            ),
            (
                "megatron.core.transformer.moe.moe_logging.MoEMetricsTracker.report",
                self.report_experts,
                "divides by the micro-batches of the flags, but units make others",
            ),
            (f"{training}.save_checkpoint_and_time", self.save, "does not name the last checkpoint if it fails"),
            (f"{training}.load_checkpoint", self.load, "exits with code 0 if it cannot load"),
            (
                f"{training}.report_theoretical_memory",
                self.report_theoretical_memory,
                "counts whole micro-batches in flight, but our schedules hold segments",
            ),
            (
                "megatron.core.utils.StragglerDetector.__exit__",
                lambda upstream, detector, *_: upstream(detector, None, None, None),
                "also logs every exception in a step, with its traceback, on every rank",
            ),
            (
                "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
                _queue_that_ends_with_its_rank,
                "starts a process that outlives a killed rank and keeps the connections of its peers open",
            ),
        )
        return (*(wrapping(*row) for row in rows), *corpora.patches(self._args))

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
        """Megatron prints the first iteration but keeps its loss for the next line, even if an interval ends there."""
        is_extra = is_first_iteration and iteration % self._args().log_interval != 0
        return upstream(losses, total_losses, learning_rate, iteration, *rest, is_first_iteration=is_extra, **more)

    def _last_step(self) -> Reading | None:
        executor = self._executor()
        return None if executor is None else executor.last_step()

    def count_documents(self, upstream: Callable) -> tuple[float | None, float | None]:
        """The tokens of all documents of a step, and the squares of their lengths; both None where none are packed."""
        tokens, squares = upstream()
        executor = self._executor()
        apart = None if executor is None else executor.documents()
        if apart is not None:
            replicas = parallel_state.get_data_parallel_group()
            sums = torch.tensor(apart, dtype=torch.float64, device=torch.cuda.current_device())
            dist.all_reduce(sums, group=replicas)
            microbatches, tokens, squares = sums.tolist()
            self._microbatches = microbatches / replicas.size()
        self._tokens = tokens
        return tokens, squares

    def report_experts(self, upstream: Callable, tracker: Any, loss_scale: float, *rest: Any, **more: Any) -> str:
        """With the mean over the micro-batches that ran, where documents are kept apart."""
        return upstream(tracker, 1 / self._microbatches if self._microbatches else loss_scale, *rest, **more)

    def report_theoretical_memory(self, upstream: Callable, args: Namespace, *rest: Any, **more: Any) -> None:
        """Only with Megatron's own schedules; the block at the start estimates ours."""
        if getattr(args, "pipeline_schedule", None) is None and not getattr(args, "pipeline_schedule_file", None):
            upstream(args, *rest, **more)

    def save(self, upstream: Callable, iteration: int, *rest: Any, **more: Any) -> None:
        """Megatron's loop saves after a loss that is not a number, even without --save."""
        folder = self._args().save
        if folder is None:
            warn_on_rank_0(_log, f"nothing is saved of iteration {iteration}, since --save is not given")
            return
        try:
            upstream(iteration, *rest, **more)
        except BaseException as error:  # torch's CheckpointException is no Exception
            free = shutil.disk_usage(folder).free / 2**20
            error.add_note(
                f"the checkpoint of iteration {iteration} was not saved; {_last_complete(Path(folder))}; {folder} has "
                f"{free:.0f} MiB free"
            )
            raise

    def load(self, upstream: Callable, *rest: Any, **more: Any) -> Any:
        """For some bad checkpoints Megatron prints the reason and exits with code 0."""
        try:
            return upstream(*rest, **more)
        except SystemExit as error:
            args = self._args()
            folder = args.load or args.pretrained_checkpoint
            raise RuntimeError(f"Megatron cannot load {folder}; what it printed last is the reason") from error


def _queue_that_ends_with_its_rank(upstream: Callable, mp_mode: str | None = None) -> Any:
    if filesystem_async._results_queue is None:
        mode = mp_mode or inspect.signature(upstream).parameters["mp_mode"].default
        manager = SyncManager(ctx=multiprocessing.get_context(mode))
        manager.start(end_with_parent)
        filesystem_async._results_queue = manager.Queue()
    return filesystem_async._results_queue


def _last_complete(folder: Path) -> str:
    try:
        iteration = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    except OSError:
        return "no checkpoint is complete yet"
    return f"the last complete checkpoint is of iteration {iteration}"
