"""Traces chosen steps of all ranks of a pipeline, and writes timelines in the format of simulated ones."""

import logging
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ...files.timeline_file import write_timeline
from ...process.patches import patched_on, wrapping
from ...schedule import Action, Kind, Shape, Span, Timeline
from .recorder import Recorder, StepRecorder

_log = logging.getLogger(__name__)


class RankTrace(NamedTuple):
    """One rank in one traced step."""

    machine: str
    origin: float  # when it left the barrier before the step, in seconds of the machine's clock
    spans: list[Span]  # in seconds of that clock, too
    peak_memory: float  # bytes above those at the start


class StepTracer(Protocol):
    """Follows training steps."""

    def step(
        self, schedule: str, shape: Shape, chunks: Sequence[Any], group: Any, lengths: Sequence[int] | None = None
    ) -> AbstractContextManager[StepRecorder]:
        """A context around one training step of the model `chunks` of this rank in the pipeline `group`, by the
        `schedule` of this name; `lengths` are those of the segments of every micro-batch, in tokens, None where they
        differ."""


class Tracer(StepTracer):
    """One file per chosen iteration and pipeline: `iteration-4-pipeline-0.json`, named by the pipeline's first rank."""

    def __init__(self, directory: Path, iterations: Collection[int], iteration_now: Callable[[], int]) -> None:
        self._directory = directory
        self._iterations = frozenset(iterations)
        self._iteration_now = iteration_now
        self._is_first_step = True

    @contextmanager
    def step(
        self, schedule: str, shape: Shape, chunks: Sequence[Any], group: Any, lengths: Sequence[int] | None = None
    ) -> Iterator[Recorder]:
        """Record one training step of the model `chunks` of this rank in the pipeline `group`; a chosen iteration with
        collectives and a file, which has the `lengths` of segments if there are any."""
        device = torch.device(torch.cuda.current_device())
        iteration = self._iteration_now()
        if self._is_first_step:
            self._is_first_step = False
            if group.rank() == 0:
                self._warn_if_all_are_over(iteration)
        if iteration not in self._iterations:
            with Recorder(device) as recorder:
                yield recorder
            return
        dist.barrier(group)
        stages = shape.placement.stages_of(group.rank())
        with Recorder(device, traced=True) as recorder, collectives_timed(chunks, stages, recorder):
            yield recorder
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        measured = RankTrace(
            machine=socket.gethostname(),
            origin=recorder.origin,
            spans=recorder.spans(),
            peak_memory=recorder.reading().peak_memory,
        )
        is_first = group.rank() == 0
        first_rank = dist.get_process_group_ranks(group)[0]
        of_ranks: list[Any] = [None] * group.size()
        dist.gather_object(measured, of_ranks if is_first else None, dst=first_rank, group=group)
        if not is_first:
            return
        meta = {"schedule": schedule, "iteration": iteration}
        if lengths is not None:
            meta["segment_lengths"] = list(lengths)
        timeline = from_barrier(shape, of_ranks, meta)
        self._directory.mkdir(parents=True, exist_ok=True)
        write_timeline(timeline, self._directory / f"iteration-{iteration}-pipeline-{first_rank}.json")

    def _warn_if_all_are_over(self, iteration: int) -> None:
        """Warn if a run goes on from a checkpoint behind all iterations to be traced."""
        if iteration > max(self._iterations, default=iteration):
            chosen = " ".join(map(str, sorted(self._iterations)))
            never = f"none of --pipeline-trace-iterations {chosen} is traced"
            _log.warning("this run starts with iteration %d: %s", iteration, never)


def from_barrier(shape: Shape, measured: Sequence[RankTrace], meta: dict[str, Any]) -> Timeline:
    """One timeline of all ranks, in seconds. Clocks share only the barrier, which a rank may leave late: the earliest
    departure by a clock is the origin of its ranks."""
    origins: dict[str, float] = {}  # by machine
    for trace in measured:
        origins[trace.machine] = min(trace.origin, origins.get(trace.machine, trace.origin))
    ranks = []
    for trace in measured:
        origin = origins[trace.machine]
        ranks.append(tuple(Span(action, start - origin, end - origin) for action, start, end in trace.spans))
    return Timeline(
        shape=shape,
        ranks=tuple(ranks),
        time_unit="s",
        meta=meta | {"peak_memory_bytes": [trace.peak_memory for trace in measured]},
    )


def collectives_timed(chunks: Iterable[torch.nn.Module], stages: Sequence[int], recorder: Recorder) -> ExitStack:
    """Inside, each collective of Megatron's DistributedDataParallel for a bucket is recorded as a REDUCE or GATHER."""

    def start(stage: int, kind: Kind, handle: str, group: Any, upstream: Callable, *args: Any, **options: Any) -> None:
        begin = recorder.now()
        upstream(*args, **options)
        recorder.collective(Action(kind, stage), begin, getattr(group, handle))

    owner = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
    collectives = (
        ("start_grad_sync", Kind.REDUCE, "grad_reduce_handle"),
        ("start_param_sync", Kind.GATHER, "param_gather_handle"),
    )
    with ExitStack() as undo:
        for chunk, stage in zip(chunks, stages, strict=True):
            groups = (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
            for name, kind, handle in collectives:
                timed = wrapping(f"{owner}.{name}", partial(start, stage, kind, handle), "starts a collective unseen")
                undo.enter_context(patched_on(groups, [timed]))
        return undo.pop_all()
