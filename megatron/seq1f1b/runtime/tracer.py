"""Writes measured timelines of chosen iterations, in the format of simulated ones."""

import logging
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..process.patches import patched, patched_on, wrapping
from ..schedule import Action, Kind, Placement, Shape, Span, Timeline, write_timeline
from .recorder import Recorder

_log = logging.getLogger(__name__)

# The method of a group of buckets that starts a collective, the attribute with its handle, the kind of action.
_COLLECTIVES = (
    ("start_grad_sync", "grad_reduce_handle", Kind.REDUCE),
    ("start_param_sync", "param_gather_handle", Kind.GATHER),
)


class Measured(NamedTuple):
    """The step of one rank in times of its machine's `clock`; the rank left the barrier before the step at `origin`."""

    clock: str
    origin: float
    spans: list[Span]
    peak_memory: float


class Tracer:
    """One file per chosen iteration and pipeline: `iteration-4-pipeline-0.json`, named by the pipeline's first rank.

    A file that cannot be written is a warning, since training matters more than its trace.
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
        chunks: Sequence[torch.nn.Module],
        group: dist.ProcessGroup,
        lengths: Sequence[int] | None = None,
    ) -> Iterator[Recorder]:
        """Record one training step of the pipeline `group`, with collectives and a file if its iteration is chosen.

        `chunks` are the model chunks of this rank, `lengths` the tokens of each segment if all micro-batches have the
        same.
        """
        device = torch.device(torch.cuda.current_device())
        iteration = self._iteration_now()
        self._warn_if_too_late(iteration, group)
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
        measured = Measured(_clock(), recorder.origin, recorder.spans(), recorder.reading().peak_memory)
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
        """A run that continues from a checkpoint may start after all chosen iterations."""
        if self._is_first_step and iteration > max(self._iterations, default=iteration) and dist.get_rank(group) == 0:
            chosen = " ".join(map(str, sorted(self._iterations)))
            _log.warning(
                "this run starts with iteration %d: none of --pipeline-trace-iterations %s is traced", iteration, chosen
            )
        self._is_first_step = False


def run_traced(function: Callable, tracer: Tracer, *, model: Any, num_microbatches: int, **options: Any) -> Any:
    """A step by `function`, one of Megatron's own schedules, recorded like one of ours."""
    run = partial(function, model=model, num_microbatches=num_microbatches, **options)
    if options.get("forward_only"):
        return run()
    chunks = model if isinstance(model, list) else [model]
    group = parallel_state.get_pipeline_model_parallel_group()
    placement = Placement(group.size(), len(chunks))
    name = "Megatron's interleaved 1F1B" if len(chunks) > 1 else "Megatron's 1F1B"
    recording = tracer.step(name, Shape(placement, num_microbatches), chunks, group)
    with recording as recorder, actions_timed(recorder, placement, group.rank()):
        return run()


def from_barrier(shape: Shape, measured: Sequence[Measured], meta: dict[str, Any]) -> Timeline:
    """One timeline of all ranks, counted from the barrier before the step.

    Clocks of different machines share the barrier only. Ranks leave it when the last one has arrived, or later if they
    are not scheduled at once, so the earliest departure by a clock is the origin of all ranks with that clock.
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
    """The name of this machine's start, from which `time.perf_counter` counts; without Linux, of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def collectives_timed(chunks: Iterable[torch.nn.Module], stages: Sequence[int], recorder: Recorder) -> ExitStack:
    """Inside, a REDUCE or GATHER is recorded whenever Megatron's DistributedDataParallel reduces the gradients of a
    bucket or gathers its parameters."""

    def start(stage: int, kind: Kind, handle: str, group: Any, upstream: Callable, *args: Any, **options: Any) -> None:
        running = recorder.collective(kind, stage)
        upstream(*args, **options)
        running(getattr(group, handle))

    owner = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
    reason = "starts a collective that a trace would not show"
    with ExitStack() as undo:
        for chunk, stage in zip(chunks, stages, strict=True):
            groups = (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
            rows = (
                wrapping(f"{owner}.{name}", partial(start, stage, kind, handle), reason)
                for name, handle, kind in _COLLECTIVES
            )
            undo.enter_context(patched_on(groups, rows))
        return undo.pop_all()


def actions_timed(recorder: Recorder, placement: Placement, rank: int) -> ExitStack:
    """Inside, forwards and backwards of Megatron's own schedules are recorded as F and B of whole sequences."""
    running: dict[int, Action] = {}

    def forward(upstream: Callable, *args: Any, current_microbatch: int, **options: Any) -> Any:
        stage = placement.stage_of(rank, options.get("vp_stage") or 0)
        action = Action(Kind.F, stage, current_microbatch, 0)
        with recorder.span(action):
            result = upstream(*args, current_microbatch=current_microbatch, **options)
        running[_identity(result[0])] = action
        return result

    def backward(upstream: Callable, arrived: Any, output: Any, *args: Any) -> Any:
        with recorder.span(running.pop(_identity(output))._replace(kind=Kind.B)):
            return upstream(arrived, output, *args)

    module, reason = "megatron.core.pipeline_parallel.schedules", "is timed by no schedule of Megatron's"
    return patched(
        (
            wrapping(f"{module}.forward_step", forward, reason),
            wrapping(f"{module}.backward_step", backward, reason),
        )
    )


def _identity(output: Any) -> int:
    """Megatron passes outputs bare or as lists of one."""
    return id(output[0] if isinstance(output, list) else output)
