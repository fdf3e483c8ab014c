"""When the gradients of a model chunk are reduced over data-parallel ranks.

Megatron's DistributedDataParallel reduces a bucket when its last parameter is ready, but only outside of `no_sync`.
So `no_sync` is left for exactly one backward per chunk: its last one in the step. Where backwards are split, it is left
for the last input-gradient half, which completes biases and norms, and for the last weight-gradient half; every
parameter must be ready as often in each step as in the first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


class GradientSync:
    """Follows Megatron's `no_sync_func`, `grad_sync_func` and `param_sync_func` for the chunks of one rank.

    `ends_last`: the rank has one chunk and is the last to end its backwards, so no rank has to be waited for, and the
    hooks may reduce even where Megatron sets `grad_sync_func`.
    """

    def __init__(self, config: Any, chunks: list[torch.nn.Module], ends_last: bool = False) -> None:
        self._chunks = chunks
        self._start_reduction = None if ends_last else _per_chunk(config.grad_sync_func, len(chunks))
        self._start_gather = _per_chunk(config.param_sync_func, len(chunks))
        self._make_no_sync = _per_chunk(config.no_sync_func, len(chunks)) or [nullcontext] * len(chunks)
        self._no_sync: list[Any] = [None] * len(chunks)
        for chunk in range(len(chunks)):
            self._enter_no_sync(chunk)

    @contextmanager
    def last_backward(self, chunk: int) -> Iterator[None]:
        """Inside, the hooks of parameters may reduce, unless Megatron sets `grad_sync_func`."""
        if self._start_reduction:
            yield
            return
        self._leave_no_sync(chunk)
        yield
        self._enter_no_sync(chunk)

    def after_last_backward(self, chunk: int) -> None:
        """Start the reduction of the whole chunk if Megatron aligns reductions (`align_grad_reduce`)."""
        self._leave_no_sync(chunk)
        if self._start_reduction:
            self._start_reduction[chunk](self._chunks[chunk].parameters())

    def before_first_forward(self, chunk: int) -> None:
        """Start gathering the parameters of the chunk if Megatron aligns that (`--align-param-gather`)."""
        if self._start_gather:
            self._start_gather[chunk](self._chunks[chunk].parameters())

    def close(self) -> None:
        """Leave every `no_sync`, at the end of a step or after it failed."""
        for chunk in range(len(self._chunks)):
            self._leave_no_sync(chunk)

    def _enter_no_sync(self, chunk: int) -> None:
        self._no_sync[chunk] = self._make_no_sync[chunk]()
        self._no_sync[chunk].__enter__()

    def _leave_no_sync(self, chunk: int) -> None:
        context, self._no_sync[chunk] = self._no_sync[chunk], None
        if context is not None:
            context.__exit__(None, None, None)


def _per_chunk(hook: Callable | list[Callable] | None, num_chunks: int) -> list[Callable] | None:
    """Megatron passes such a hook bare for one chunk, and a list of them for several."""
    if hook is None or isinstance(hook, list):
        return hook
    return [hook] * num_chunks
