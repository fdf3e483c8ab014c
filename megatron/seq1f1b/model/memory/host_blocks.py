"""Blocks of host memory for activations, which serve one unit and step after the other.

Memory is taken in blocks, since units differ in size. For a GPU they are pinned. Pinning takes the host 0.2 to 0.6 s a
GiB, and whatever is launched meanwhile may wait for all that runs on the GPU, receives included. The first step that
moves anything has no receive under way then (see `goes_in_turn` in runtime/communication.py). If a later step needs
more blocks, these are pinned at its end only: until then their copies take the host's time, and need nothing of other
ranks that has not been sent. On a CPU blocks are mapped files, a second pool beside the memory of the process.

Tested in model/test_host_memory.py.
"""

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from .copies import Wait

BLOCK = 1 << 20  # bytes
# Pinning many small blocks would take long; PyTorch rounds the size of pinned ones up to a power of two.
_PINNED_BLOCK = 1 << 24


class _UnusedBlock(NamedTuple):
    """A block for later units and steps. `end` waits for the last copy from it, if one may still run."""

    block: Tensor
    end: Wait | None


class HostBlocks:
    """The blocks of one process. `new_buffer(num_bytes)` makes those of a run on CPUs."""

    def __init__(self, is_on_gpu: bool, new_buffer: Callable[[int], Tensor] | None = None) -> None:
        self._is_on_gpu = is_on_gpu
        self._new_buffer = new_buffer or mapped_buffer
        self._size = _PINNED_BLOCK if is_on_gpu else BLOCK
        self._unused: list[_UnusedBlock] = []  # the longest unused come first
        self._may_pin = True  # no step that moves anything has ended
        self._unpinned: set[int] = set()  # blocks to be pinned at the end of the step, by their address

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def take(self, num_bytes: int) -> tuple[list[Tensor], Wait]:
        """Blocks for so many bytes, and a wait for the last copies from them. Raises MemoryError if the host is
        full."""
        count = -(-num_bytes // self._size)
        missing = count - len(self._unused)
        if missing > 0:
            self.give_back(self._new(missing))
        chosen = self._unused[:count]
        self._unused = self._unused[count:]
        ends = dict.fromkeys(unused.end for unused in chosen if unused.end is not None)

        def wait_for_all() -> None:
            for end in ends:
                with suppress(Exception):  # one that failed is over, too, and who waits for its bytes has its error
                    end()

        return [unused.block for unused in chosen], wait_for_all

    def give_back(self, blocks: Iterable[Tensor], end: Wait | None = None) -> None:
        """Leave blocks to later units once `end` is over."""
        self._unused += [_UnusedBlock(block, end) for block in blocks]

    def end_step(self) -> None:
        """Pin the blocks that the step could not pin. All its blocks have been given back."""
        if self._unused:
            self._may_pin = False
        if self._unpinned:
            number = len(self._unpinned)
            self._unused = [unused for unused in self._unused if unused.block.data_ptr() not in self._unpinned]
            self._unpinned.clear()
            self.give_back(_made(number, self._size, pinned_buffer))

    def _new(self, number: int) -> list[Tensor]:
        if not self._is_on_gpu:
            return _made(number, self._size, self._new_buffer)
        if self._may_pin:
            return _made(number, self._size, pinned_buffer)
        blocks = _made(number, self._size, pageable_buffer)
        self._unpinned.update(block.data_ptr() for block in blocks)
        return blocks


def _made(number: int, size: int, make: Callable[[int], Tensor]) -> list[Tensor]:
    """Blocks of `size` bytes. Raises MemoryError if the host is full."""
    blocks: list[Tensor] = []
    try:
        while len(blocks) < number:
            blocks.append(make(size))
    except (MemoryError, OSError, RuntimeError) as error:
        raise MemoryError(
            f"the host has no room for {(number - len(blocks)) * size / 2**30:.2f} GiB more of activations "
            f"({error}); lower --offload-activations"
        ) from error
    return blocks


def pinned_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def pageable_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def mapped_buffer(num_bytes: int) -> Tensor:
    """Bytes of an unnamed temporary file. Raises OSError if the disk is full."""
    with tempfile.NamedTemporaryFile(prefix="seq1f1b-") as file:  # the mapping outlives it
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full disk would kill the process
        return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
