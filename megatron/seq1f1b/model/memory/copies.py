"""Copies between a device and its host, which run beside compute, and the rate that they reach.

Tested in model/test_host_memory.py.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

# What measures the link takes milliseconds on a GPU.
_PROBE = 1 << 24  # bytes
_ROUNDS = 16  # copies each way

Wait = Callable[[], object]  # for the end of copies: the running stream waits on a GPU, the running thread on a CPU
Pairs = list[tuple[Tensor, Tensor]]  # source and target, of one size
Copy = Callable[[Pairs, Wait | None, AbstractContextManager], None]


class CopyLane(Protocol):
    """The copies of one direction, which run one after another, beside compute."""

    def copy(self, pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> Wait:
        """Start copies once `after` is over, inside `span`; they empty `pairs`. Tensors must outlive the wait."""


def copy_lane(is_on_gpu: bool, copy: Copy | None = None) -> CopyLane:
    """A lane whose `copy(pairs, after, span)` does what `copy_pairs` does, in place of that if it is given."""
    copy = copy or copy_pairs
    return _StreamLane(copy) if is_on_gpu else _ThreadLane(copy)


class _StreamLane(CopyLane):
    """Copies in a stream of a GPU."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._stream = torch.cuda.Stream()

    def copy(self, pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> Wait:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(pairs, after, span)
            return self._stream.record_event().wait


class _ThreadLane(CopyLane):
    """Copies in a thread of a CPU."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        # Python ends after such a thread, not within its copies. These wait for one another only, so they all end.
        self._thread = ThreadPoolExecutor(1, "seq1f1b-copies")

    def copy(self, pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> Wait:
        return self._thread.submit(self._copy, pairs, after, span).result


def copy_pairs(pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> None:
    """Copy each pair once `after` is over, inside `span`; empties `pairs`."""
    if after is not None:
        after()
    with span:
        while pairs:  # removes them, so that an idle thread keeps no tensor alive
            source, target = pairs.pop()
            target.copy_(source, non_blocking=True)


def link_rate(device: torch.device, when_ready: Callable[[], object]) -> float:
    """Bytes/s between a device and its host, each way while both are in use; `when_ready` lets ranks start together."""
    is_on_gpu = device.type == "cuda"
    to_host = copy_lane(is_on_gpu)
    from_host = copy_lane(is_on_gpu)
    here = torch.empty(2, _PROBE, dtype=torch.uint8, device=device)
    there = torch.empty(2, _PROBE, dtype=torch.uint8, pin_memory=is_on_gpu)
    for rounds in (1, _ROUNDS):  # the first touches all pages
        when_ready()
        start = perf_counter()
        departure = to_host.copy([(here[0], there[0])] * rounds, None, nullcontext())
        arrival = from_host.copy([(there[1], here[1])] * rounds, None, nullcontext())
        departure()
        arrival()
        if is_on_gpu:
            torch.cuda.synchronize()
    return _ROUNDS * _PROBE / (perf_counter() - start)
