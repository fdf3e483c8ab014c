"""Measures the actions and the memory of a step, and writes timelines in the format of simulated ones."""

import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..process.patches import patched, patched_on, wrapping
from ..schedule import COMPUTE_KINDS, Action, Kind, Placement, Shape, Span, Timeline, busy_time, write_timeline

_log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """One rank in one step: seconds in actions, seconds to the end of the last one, bytes above those at the start."""

    busy: float
    duration: float
    peak_memory: float


class RankTrace(NamedTuple):
    """One rank in one traced step: its machine, and when it left the barrier before the step, in seconds of that
    machine's clock, in which its spans are, too; bytes above those at the start."""

    machine: str
    origin: float
    spans: list[Span]
    peak_memory: float


class StepRecorder(Protocol):
    """Notes the actions of one rank in one step."""

    def span(self, action: Action) -> AbstractContextManager[None]:
        """A context whose body is `action`; for the copies of an OFFLOAD or RELOAD it is entered in their thread."""


class StepTracer(Protocol):
    """Follows training steps."""

    def step(
        self, schedule: str, shape: Shape, chunks: Sequence[Any], group: Any, lengths: Collection[Sequence[int]] = ()
    ) -> AbstractContextManager[StepRecorder]:
        """A context around one training step of the model `chunks` of this rank in the pipeline `group`, by the
        `schedule` of this name; `lengths` are the cuts of its sequences, in tokens."""


class Recorder(StepRecorder):
    """One rank in one step, which runs inside `with`; nothing in it waits for the device.

    A `traced` step begins when the device is idle, at `origin` of this machine's clock. On a GPU only a traced step
    resets the peak of memory, which Megatron's reports share; otherwise the peak is that of the whole run.
    """

    def __init__(self, device: torch.device, traced: bool = False) -> None:
        self._device = device
        if traced or device.type != "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._allocated = torch.cuda.memory_allocated(device)
        # Marks a moment: on a GPU an event on its current stream, so that nothing waits.
        self.now = _event if device.type == "cuda" else time.perf_counter
        self._marks: list[tuple[Action, Any, Any]] = []
        self._collectives: list[tuple[Action, Any, torch.futures.Future]] = []
        self._peak = 0
        if traced and device.type == "cuda":
            torch.cuda.synchronize(device)
        self._start = self.now()
        self.origin = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._peak = torch.cuda.max_memory_allocated(self._device) - self._allocated

    def span(self, action: Action) -> AbstractContextManager[None]:
        return _Timed(self.now, self._marks, action)

    def collective(self, action: Action, start: Any, handle: Any) -> None:
        """Record a REDUCE or GATHER with this `handle` that began at the mark `start`, if it runs beside compute.

        Its end is taken in the thread of gloo, or on the stream that waits for NCCL.
        """
        for part in getattr(handle, "works", ()):
            try:
                end = part.get_future().then(lambda _: self.now())
            except RuntimeError:  # gloo's reduce-scatter has no callback
                end = torch.futures.Future()
                handle.wait = partial(self._wait_and_mark, handle.wait, end)
            self._collectives.append((action, start, end))

    def _wait_and_mark(self, wait: Callable[[], Any], end: torch.futures.Future) -> None:
        wait()
        end.set_result(self.now())

    def reading(self) -> Reading:
        """The step in numbers; a GPU must have finished it."""
        marks = [mark for mark in self._marks if mark[0].kind in COMPUTE_KINDS]
        spans = [Span(action, _seconds(self._start, start), _seconds(self._start, end)) for action, start, end in marks]
        spans.sort(key=lambda span: span.start)
        return Reading(busy_time(spans), max((span.end for span in spans), default=0.0), self._peak)

    def spans(self) -> list[Span]:
        """All recorded actions by start, in seconds of this machine's monotonic clock, once collectives are over. The
        buckets of a chunk share one span."""
        marks = self._marks + [(action, start, end.wait()) for action, start, end in self._collectives]
        spans: dict[Action, Span] = {}
        for action, *ends in marks:
            start, end = (self.origin + _seconds(self._start, mark) for mark in ends)
            same = spans.get(action, Span(action, start, end))
            spans[action] = Span(action, min(start, same.start), max(end, same.end))
        return sorted(spans.values(), key=lambda span: span.start)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class _Timed:
    """A context manager as a class, since a generator would take the host several times as long."""

    __slots__ = ("_action", "_marks", "_now", "_start")

    def __init__(self, now: Callable[[], Any], marks: list[tuple[Action, Any, Any]], action: Action) -> None:
        self._now = now
        self._marks = marks
        self._action = action

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._action, self._start, self._now()))


class Tracer(StepTracer):
    """One file per chosen iteration and pipeline: `iteration-4-pipeline-0.json`, named by the pipeline's first rank."""

    def __init__(self, directory: Path, iterations: Collection[int], iteration_now: Callable[[], int]) -> None:
        self._directory = directory
        self._iterations = frozenset(iterations)
        self._iteration_now = iteration_now
        self._is_first_step = True

    @contextmanager
    def step(
        self, schedule: str, shape: Shape, chunks: Sequence[Any], group: Any, lengths: Collection[Sequence[int]] = ()
    ) -> Iterator[Recorder]:
        """Record one training step of the model `chunks` of this rank in the pipeline `group`; a chosen iteration with
        collectives and a file, which has the `lengths` of segments if there is one cut for all micro-batches."""
        device = torch.device(torch.cuda.current_device())
        iteration = self._iteration_now()
        if self._is_first_step and iteration > max(self._iterations, default=iteration) and group.rank() == 0:
            chosen = " ".join(map(str, sorted(self._iterations)))  # perhaps from before its checkpoint
            never = f"none of --pipeline-trace-iterations {chosen} is traced"
            _log.warning("this run starts with iteration %d: %s", iteration, never)
        self._is_first_step = False
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
        gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
        first_rank = dist.get_process_group_ranks(group)[0]
        dist.gather_object(measured, gathered, dst=first_rank, group=group)
        if gathered is None:
            return
        meta = {"schedule": schedule, "iteration": iteration}
        if len(lengths) == 1:
            meta["segment_lengths"] = [*next(iter(lengths))]
        timeline = from_barrier(shape, gathered, meta)
        self._directory.mkdir(parents=True, exist_ok=True)
        write_timeline(timeline, self._directory / f"iteration-{iteration}-pipeline-{first_rank}.json")


def run_traced(function: Callable, tracer: StepTracer, **options: Any) -> Any:
    """A step by `function`, one of Megatron's own schedules, recorded like one of ours."""
    if options.get("forward_only"):
        return function(**options)
    chunks = options["model"] if isinstance(options["model"], list) else [options["model"]]
    group = parallel_state.get_pipeline_model_parallel_group()
    placement = Placement(group.size(), len(chunks))
    name = "Megatron's interleaved 1F1B" if len(chunks) > 1 else "Megatron's 1F1B"
    recording = tracer.step(name, Shape(placement, options["num_microbatches"]), chunks, group)
    with recording as recorder, actions_timed(recorder, placement, group.rank()):
        return function(**options)


def from_barrier(shape: Shape, measured: Sequence[RankTrace], meta: dict[str, Any]) -> Timeline:
    """One timeline of all ranks, in seconds. Clocks share only the barrier, which a rank may leave late: the earliest
    departure by a clock is the origin of its ranks."""
    left: dict[str, float] = {}
    for each in measured:
        left[each.machine] = min(each.origin, left.get(each.machine, each.origin))
    ranks = tuple(
        tuple(Span(span.action, span.start - left[each.machine], span.end - left[each.machine]) for span in each.spans)
        for each in measured
    )
    return Timeline(
        shape=shape,
        ranks=ranks,
        time_unit="s",
        meta=meta | {"peak_memory_bytes": [each.peak_memory for each in measured]},
    )


def collectives_timed(chunks: Iterable[torch.nn.Module], stages: Sequence[int], recorder: Recorder) -> ExitStack:
    """Inside, each collective of Megatron's DistributedDataParallel for a bucket is recorded as a REDUCE or GATHER."""

    def start(stage: int, kind: Kind, handle: str, group: Any, upstream: Callable, *args: Any, **options: Any) -> None:
        begin = recorder.now()
        upstream(*args, **options)
        recorder.collective(Action(kind, stage), begin, getattr(group, handle))

    owner = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
    with ExitStack() as undo:
        for chunk, stage in zip(chunks, stages, strict=True):
            groups = (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
            reduces = partial(start, stage, Kind.REDUCE, "grad_reduce_handle")
            gathers = partial(start, stage, Kind.GATHER, "param_gather_handle")
            table = [wrapping(f"{owner}.start_grad_sync", reduces, "starts a collective unseen")]
            table.append(wrapping(f"{owner}.start_param_sync", gathers, "starts a collective unseen"))
            undo.enter_context(patched_on(groups, table))
        return undo.pop_all()


def actions_timed(recorder: StepRecorder, placement: Placement, rank: int) -> ExitStack:
    """Inside, forwards and backwards of Megatron's own schedules are recorded as F and B of whole sequences."""
    running: dict[int, Action] = {}

    def identity(output: Any) -> int:  # Megatron passes outputs bare or as lists of one
        return id(output[0] if isinstance(output, list) else output)

    def forward(upstream: Callable, *args: Any, current_microbatch: int, **options: Any) -> Any:
        stage = placement.stage_of(rank, options.get("vp_stage") or 0)
        action = Action(Kind.F, stage, current_microbatch, 0)
        with recorder.span(action):
            result = upstream(*args, current_microbatch=current_microbatch, **options)
        running[identity(result[0])] = action
        return result

    def backward(upstream: Callable, arrived: Any, output: Any, *args: Any) -> Any:
        with recorder.span(running.pop(identity(output))._replace(kind=Kind.B)):
            return upstream(arrived, output, *args)

    module = "megatron.core.pipeline_parallel.schedules"
    reason = "is timed by no schedule of Megatron's"
    table: dict[str, Callable] = {"forward_step": forward, "backward_step": backward}
    return patched(wrapping(f"{module}.{name}", function, reason) for name, function in table.items())
