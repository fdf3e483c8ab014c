"""Writes the measured timelines of chosen iterations, in the form of simulated ones."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..schedule import Shape, Span, Timeline, write_timeline
from .meter import PeakMemory
from .recorder import Recorder

_log = logging.getLogger(__name__)


class Measured(NamedTuple):
    """The step of one rank: times of its machine's `clock`, `origin` when it left the barrier before the step."""

    clock: str
    origin: float
    spans: list[Span]
    peak_memory: int


class Tracer:
    """One file per chosen iteration and pipeline: `iteration-4-pipeline-0.json`, named by the pipeline's first rank.

    A file that cannot be written is a warning: a trace is not worth the end of a training.
    """

    def __init__(self, directory: Path, iterations: Collection[int], iteration_now: Callable[[], int]) -> None:
        self._directory = directory
        self._iterations = frozenset(iterations)
        self._iteration_now = iteration_now
        self._is_first_step = True

    @contextmanager
    def step(
        self,
        schedule: str,
        shape: Shape,
        group: dist.ProcessGroup,
        device: torch.device,
        lengths: Sequence[int] | None = None,
    ) -> Iterator[Recorder | None]:
        """Record one training step of the pipeline `group`; gives None for an iteration that is not chosen.

        `lengths` are those of the segments in tokens, if they are the same in all micro-batches.
        """
        iteration = self._iteration_now()
        self._warn_if_too_late(iteration, group)
        if iteration not in self._iterations:
            yield None
            return
        memory = PeakMemory(device)
        dist.barrier(group)
        recorder = Recorder(device)
        yield recorder
        measured = Measured(_clock(), recorder.origin, recorder.spans(), memory.peak())
        is_writer = dist.get_rank(group) == 0
        gathered = [None] * dist.get_world_size(group) if is_writer else None
        first_rank = dist.get_process_group_ranks(group)[0]
        dist.gather_object(measured, gathered, dst=first_rank, group=group)
        if is_writer:
            meta = {"schedule": schedule, "iteration": iteration}
            if lengths is not None:
                meta["segment_lengths"] = list(lengths)
            timeline = from_barrier(shape, gathered, meta)
            self._write(timeline, f"iteration-{iteration}-pipeline-{first_rank}.json")

    def _write(self, timeline: Timeline, name: str) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_timeline(timeline, self._directory / name)
        except OSError as error:
            _log.warning("the trace %s is not written: %s", self._directory / name, error)

    def _warn_if_too_late(self, iteration: int, group: dist.ProcessGroup) -> None:
        """A run that goes on from a checkpoint may start beyond all iterations that are to be traced."""
        if self._is_first_step and iteration > max(self._iterations, default=iteration) and dist.get_rank(group) == 0:
            chosen = " ".join(map(str, sorted(self._iterations)))
            _log.warning(
                "this run starts with iteration %d: none of --pipeline-trace-iterations %s is traced", iteration, chosen
            )
        self._is_first_step = False


def from_barrier(shape: Shape, measured: Sequence[Measured], meta: dict[str, Any]) -> Timeline:
    """One timeline of all ranks, counted from the barrier before the step.

    Clocks of different machines have nothing in common but the barrier. Ranks leave it when the last has come, or later
    if they are not scheduled at once, so the earliest departure by a clock is the origin of all ranks with that clock.
    """
    left: dict[str, float] = {}
    for clock, origin, _, _ in measured:
        left[clock] = min(origin, left.get(clock, origin))
    ranks = tuple(
        tuple(Span(span.action, span.start - left[clock], span.end - left[clock]) for span in spans)
        for clock, _, spans, _ in measured
    )
    return Timeline(shape, ranks, "s", meta | {"peak_memory_bytes": [peak for *_, peak in measured]})


def _clock() -> str:
    """Names what `time.perf_counter` counts from: the start of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
