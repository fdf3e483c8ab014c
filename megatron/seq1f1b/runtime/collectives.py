"""When Megatron's DistributedDataParallel reduces gradients and gathers parameters."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..patches import Patch, PatchTable, Scope, patched_on

# Of a group of buckets: the method that starts a collective, the attribute with its handle, the kind of action.
_COLLECTIVES = (
    ("start_grad_sync", "grad_reduce_handle", "REDUCE"),
    ("start_param_sync", "param_gather_handle", "GATHER"),
)


def trace_collectives(
    chunks: Iterable[torch.nn.Module], stages: Sequence[int], begin: Callable[[str, int], Callable[[Any], None]]
) -> ExitStack:
    """Inside, `begin(kind, stage)` is called when the reduction of a bucket's gradients (REDUCE) or the gathering of
    its parameters (GATHER) starts; its result, unless it is None, is called with the handle of the collective.
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
