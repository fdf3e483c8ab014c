"""When Megatron's DistributedDataParallel reduces gradients and gathers parameters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Of a group of buckets: the method that starts a collective, the attribute with its handle, the kind of action.
_COLLECTIVES = (
    ("start_grad_sync", "grad_reduce_handle", "REDUCE"),
    ("start_param_sync", "param_gather_handle", "GATHER"),
)


@contextmanager
def trace_collectives(
    chunks: Iterable[torch.nn.Module], stages: Sequence[int], begin: Callable[[str, int], Callable[[Any], None]]
) -> Iterator[None]:
    """Inside, `begin(kind, stage)` is called as the gradients of a bucket start to be reduced (REDUCE) or its
    parameters to be gathered (GATHER), and what it returns with the handle of what runs from then on, or None.
    """
    traced = []
    for chunk, stage in zip(chunks, stages, strict=True):
        for group in (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())):
            for name, handle, kind in _COLLECTIVES:
                setattr(group, name, _traced(group, name, handle, lambda kind=kind, stage=stage: begin(kind, stage)))
                traced.append((group, name))
    try:
        yield
    finally:
        for group, name in traced:
            delattr(group, name)


def _traced(group: Any, name: str, handle: str, begin: Callable[[], Callable[[Any], None]]) -> Callable:
    start = getattr(group, name)

    def traced(*args: Any, **kwargs: Any) -> None:
        running = begin()
        start(*args, **kwargs)
        running(getattr(group, handle))

    return traced
