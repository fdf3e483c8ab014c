"""Writes the measured timelines of chosen iterations, in the form of simulated ones."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..schedule import Shape, Span, Timeline, write_timeline
from .memory import PeakMemory
from .recorder import Recorder


class Tracer:
    """One file per chosen iteration and pipeline: `iteration-4-pipeline-0.json`, named by the pipeline's first rank."""

    def __init__(self, directory: Path, iterations: Collection[int], iteration_now: Callable[[], int]) -> None:
        self._directory = directory
        self._iterations = frozenset(iterations)
        self._iteration_now = iteration_now

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
        if iteration not in self._iterations:
            yield None
            return
        memory = PeakMemory(device)
        dist.barrier(group)
        recorder = Recorder(device)
        yield recorder
        measured = (recorder.spans(), memory.peak())
        is_writer = dist.get_rank(group) == 0
        gathered = [None] * dist.get_world_size(group) if is_writer else None
        first_rank = dist.get_process_group_ranks(group)[0]
        dist.gather_object(measured, gathered, dst=first_rank, group=group)
        if is_writer:
            meta = {"schedule": schedule, "iteration": iteration}
            if lengths is not None:
                meta["segment_lengths"] = list(lengths)
            timeline = _from_step_start(shape, gathered, meta)
            self._directory.mkdir(parents=True, exist_ok=True)
            write_timeline(timeline, self._directory / f"iteration-{iteration}-pipeline-{first_rank}.json")


def _from_step_start(shape: Shape, measured: list[tuple[list[Span], int]], meta: dict[str, Any]) -> Timeline:
    """One timeline of all ranks, counted from the first start."""
    start = min(span.start for spans, _ in measured for span in spans)
    ranks = tuple(
        tuple(Span(span.action, span.start - start, span.end - start) for span in spans) for spans, _ in measured
    )
    return Timeline(shape, ranks, "s", meta | {"peak_memory_bytes": [peak for _, peak in measured]})
