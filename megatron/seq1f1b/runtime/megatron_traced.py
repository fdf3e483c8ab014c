"""Timers around functions of Megatron: its collectives beside compute, and forwards and backwards of its schedules."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..patches import patched, patched_on, wrapping
from ..schedule import Action, Kind, Placement
from .recorder import Recorder

# The method of a group of buckets that starts a collective, the attribute with its handle, the kind of action.
_COLLECTIVES = (
    ("start_grad_sync", "grad_reduce_handle", Kind.REDUCE),
    ("start_param_sync", "param_gather_handle", Kind.GATHER),
)


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
