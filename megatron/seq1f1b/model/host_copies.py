"""Copies between a device and the memory of the host that run beside compute, and the buffers of the host.

A lane is one direction: its copies run one after the other. On a GPU it is a stream, buffers are pinned, and the host
waits for nothing. On a CPU it is a thread, and the memory of the host a second pool, of mapped files, so that order and
lifetime are as real there and the operating system may write that memory to disk.
"""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

# Waits for the end of copies: the running stream on a GPU, the running thread on a CPU.
Wait = Callable[[], object]
# Source and target, of one size.
Pairs = list[tuple[Tensor, Tensor]]

_LONGEST = 600.0  # seconds that a copy may take on a CPU


class Lane(Protocol):
    """One direction."""

    def copy(self, pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> Wait:
        """Start copies of what has been computed, once `after` is over; they run inside `span`, and empty `pairs`.

        Neither end may be freed before the wait that is returned.
        """


class StreamLane:
    """Of a GPU."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def copy(self, pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> Wait:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(pairs, after, span)
            return self._stream.record_event().wait


class ThreadLane:
    """Of a CPU."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "seq1f1b-copies")

    def copy(self, pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> Wait:
        copies = self._thread.submit(_copy, pairs, after, span)
        return lambda: _result(copies)


def _copy(pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> None:
    if after is not None:
        after()
    with span:
        while pairs:  # a thread that has copied keeps nothing alive
            source, target = pairs.pop()
            target.copy_(source, non_blocking=True)


def _result(copies: Future) -> None:
    try:
        copies.result(_LONGEST)
    except TimeoutError:
        raise TimeoutError(f"a copy between device and host has not ended after {_LONGEST:.0f} seconds") from None


def pinned_buffer(num_bytes: int) -> Tensor:
    """Bytes of the host that a GPU copies from and to by itself. Raises MemoryError where the host has too few."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    # Memory that is registered has the size that was asked for; `pin_memory` rounds it up to a power of two.
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
    if error.value != 0:
        raise MemoryError(f"cudaHostRegister: error {error.value}")
    return buffer


def mapped_buffer(num_bytes: int) -> Tensor:
    """Bytes of a file without a name in the folder of temporary files. Raises OSError where the disk is full."""
    with tempfile.NamedTemporaryFile(prefix="seq1f1b-") as file:  # the mapping outlives the name
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full disk would kill the process
        return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
