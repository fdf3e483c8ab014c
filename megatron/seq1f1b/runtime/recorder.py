"""When the actions of a step ran: of our schedules, of Megatron's own, and of collectives that run beside compute."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ..patches import Patch, PatchTable, Scope, patched_on
from ..schedule import Action, Kind, Placement, Span
from .meter import clock_of

# Of a group of buckets: the method that starts a collective, the attribute with its handle, the kind of action.
_COLLECTIVES = (
    ("start_grad_sync", "grad_reduce_handle", "REDUCE"),
    ("start_param_sync", "param_gather_handle", "GATHER"),
)


class Recorder:
    """The spans of one rank in one step. `origin` is when it was made, by this machine's clock.

    On a GPU the ends of an action are events on the current stream, read when the step is over, so that recording does
    not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._clock = clock_of(device)
        self._marks: list[tuple[Action, Any, Any]] = []
        self._collectives: list[tuple[Action, Any, torch.futures.Future]] = []
        if self._is_on_gpu:
            torch.cuda.synchronize(device)
        self._start = self._clock.now()
        self.origin = time.perf_counter()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Time the body as `action`."""
        start = self._clock.now()
        yield
        self._marks.append((action, start, self._clock.now()))

    def collective(self, kind: str, stage: int) -> Callable[[Any], None]:
        """Time a REDUCE or GATHER from now; call the result with the handle as soon as the collective runs.

        Only what runs beside compute is recorded. Its end is taken in the thread of gloo, or on the stream that waits
        for NCCL; a reduce-scatter by gloo, which has no callback, ends when it has been waited for.
        """
        action, start = Action(Kind(kind), stage), self._clock.now()

        def running(handle: Any) -> None:
            for part in getattr(handle, "works", ()):
                try:
                    end = part.get_future().then(lambda _: self._clock.now())
                except RuntimeError:
                    end = self._when_waited_for(handle)
                self._collectives.append((action, start, end))

        return running

    def _when_waited_for(self, handle: Any) -> torch.futures.Future:
        end, wait = torch.futures.Future(), handle.wait

        def waited() -> None:
            wait()
            end.set_result(self._clock.now())

        handle.wait = waited
        return end

    def spans(self) -> list[Span]:
        """What was recorded, in the order of the starts; times in seconds of this machine's monotonic clock.

        The collectives of one chunk, which has several buckets, are one span. All have to have been waited for.
        """
        marks = self._marks + [(action, start, end.wait()) for action, start, end in self._collectives]
        if self._is_on_gpu:
            torch.cuda.synchronize()
        spans: dict[Action, Span] = {}
        for action, start, end in marks:
            start, end = self._time(start), self._time(end)
            same = spans.get(action, Span(action, start, end))
            spans[action] = Span(action, min(start, same.start), max(end, same.end))
        return sorted(spans.values(), key=lambda span: span.start)

    def _time(self, mark: Any) -> float:
        return self.origin + self._clock.seconds(self._start, mark)


class UpstreamSteps:
    """Megatron's `forward_step` and `backward_step`, timed; they take the places of those during one call."""

    def __init__(
        self, forward_step: Callable, backward_step: Callable, recorder: Recorder, placement: Placement, rank: int
    ) -> None:
        self._forward_step = forward_step
        self._backward_step = backward_step
        self._recorder = recorder
        self._placement = placement
        self._rank = rank
        self._running: dict[int, Action] = {}

    def forward_step(self, *args: Any, current_microbatch: int, vp_stage: int | None = None, **kwargs: Any) -> Any:
        """Time a forward as F of its stage and micro-batch."""
        action = Action(Kind.F, self._placement.stage_of(self._rank, vp_stage or 0), current_microbatch, 0)
        with self._recorder.span(action):
            result = self._forward_step(*args, current_microbatch=current_microbatch, vp_stage=vp_stage, **kwargs)
        self._running[_identity(result[0])] = action
        return result

    def backward_step(self, input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        """Time a backward as B of the unit whose forward gave `output_tensor`."""
        action = self._running.pop(_identity(output_tensor))._replace(kind=Kind.B)
        with self._recorder.span(action):
            return self._backward_step(input_tensor, output_tensor, *args)


def _identity(output: Any) -> int:
    """Megatron passes outputs bare or as lists of one."""
    return id(output[0] if isinstance(output, list) else output)


def trace_collectives(
    chunks: Iterable[torch.nn.Module], stages: Sequence[int], begin: Callable[[str, int], Callable[[Any], None]]
) -> ExitStack:
    """Inside, `begin(kind, stage)` is called when Megatron's DistributedDataParallel starts to reduce the gradients of
    a bucket (REDUCE) or to gather its parameters (GATHER); its result is called with the handle of the collective.
    """
    with ExitStack() as undo:
        for chunk, stage in zip(chunks, stages, strict=True):
            groups = (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
            undo.enter_context(patched_on(groups, _traced(stage, begin)))
        return undo.pop_all()


def _traced(stage: int, begin: Callable[[str, int], Callable[[Any], None]]) -> PatchTable:
    module = "megatron.core.distributed.param_and_grad_buffer"
    return PatchTable(
        Scope.STEP,
        tuple(
            Patch(
                f"{module}._ParamAndGradBucketGroup.{name}",
                partial(partial, partial(_start, partial(begin, kind, stage), handle)),
                "starts a collective that a trace would not show",
                wraps=True,
            )
            for name, handle, kind in _COLLECTIVES
        ),
    )


def _start(
    begin: Callable[[], Callable[[Any], None]], handle: str, group: Any, start: Callable, *args: Any, **kwargs: Any
) -> None:
    running = begin()
    start(*args, **kwargs)
    running(getattr(group, handle))
