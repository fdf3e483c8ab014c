"""Copies between device and host memory that overlap with compute, and the buffers on the host.

On a GPU buffers are pinned, and the host waits for nothing. On a CPU the memory of the host is a second pool, of mapped
files, so order and lifetimes are those of a GPU, and the operating system may write that memory to disk.
"""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch import Tensor

_PROBE, _ROUNDS = 1 << 24, 16  # bytes, and copies each way, that measure the link; milliseconds on a GPU

# Waits for the end of copies: the running stream on a GPU, the running thread on a CPU.
Wait = Callable[[], object]
# Source and target, of one size.
Pairs = list[tuple[Tensor, Tensor]]


class Lane:
    """The copies of one direction, which run one after another: in a stream of a GPU, or in a thread on a CPU."""

    def __init__(self, is_on_gpu: bool) -> None:
        self._stream = torch.cuda.Stream() if is_on_gpu else None
        self._thread = None if is_on_gpu else ThreadPoolExecutor(1, "seq1f1b-copies")

    def copy(self, pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> Wait:
        """Start copies of computed tensors once `after` is over; they run inside `span`, and empty `pairs`.

        Neither end may be freed before the returned wait.
        """
        if self._stream is None:
            return self._thread.submit(_copy, pairs, after, span).result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(pairs, after, span)
            return self._stream.record_event().wait


def _copy(pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> None:
    if after is not None:
        after()
    with span:
        while pairs:  # removes them, so that an idle thread keeps no tensor alive
            source, target = pairs.pop()
            target.copy_(source, non_blocking=True)


def link_rate(device: torch.device, when_ready: Callable[[], object]) -> float:
    """Bytes/s between a device and its host, each way while both are in use; `when_ready` lets ranks start together."""
    is_on_gpu = device.type == "cuda"
    lanes = Lane(is_on_gpu), Lane(is_on_gpu)
    here = torch.empty(2, _PROBE, dtype=torch.uint8, device=device)
    there = torch.empty(2, _PROBE, dtype=torch.uint8, pin_memory=is_on_gpu)
    pairs = (here[0], there[0]), (there[1], here[1])

    def seconds(rounds: int) -> float:
        start = perf_counter()
        for end in [lane.copy([pair] * rounds, None, nullcontext()) for lane, pair in zip(lanes, pairs, strict=True)]:
            end()
        if is_on_gpu:
            torch.cuda.synchronize()
        return perf_counter() - start

    seconds(1)  # touches all pages
    when_ready()
    return _ROUNDS * _PROBE / seconds(_ROUNDS)


def pinned_buffer(num_bytes: int) -> Tensor:
    """Pinned bytes of the host. Raises MemoryError if there are too few."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    # `pin_memory` would round the size up to a power of two.
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
    if error.value != 0:
        raise MemoryError(f"cudaHostRegister: error {error.value}")
    return buffer


def mapped_buffer(num_bytes: int) -> Tensor:
    """Bytes of an unnamed temporary file. Raises OSError if the disk is full."""
    with tempfile.NamedTemporaryFile(prefix="seq1f1b-") as file:  # the mapping outlives it
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full disk would kill the process
        return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
