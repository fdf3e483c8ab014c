"""Groups of storages on their way to the memory of the host and back, beside compute.

Tested in model/test_host_memory.py by test_blocks_of_the_host_serve_again.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, UntypedStorage

from .copies import Copy, CopyLane, Pairs, Wait, copy_lane
from .host_blocks import HostBlocks
from .storages import Storage

_ALIGNMENT = 1 << 9  # bytes


@dataclass(eq=False)
class MovedGroup:
    """Storages that leave, and come back, together; those `leaving` may still be copied from. `arrival` waits for them,
    once they come back."""

    storages: list[Storage]
    blocks: list[Tensor]
    departure: Wait
    leaving: list[UntypedStorage]
    arrival: Wait | None = None

    @property
    def num_bytes(self) -> int:
        return sum(storage.num_bytes for storage in self.storages)

    def settle(self) -> None:
        """Free their memory on the device."""
        if self.leaving:
            self.departure()
            self.leaving.clear()

    def arrive(self) -> None:
        """Wait for those that come back."""
        assert self.arrival is not None, "they are on their way"
        self.arrival()
        for storage in self.storages:
            storage.bring = None


class HostTransfers:
    """The copies of groups in both directions, and the blocks of the host that hold them meanwhile. At most
    `most_leaving` groups leave at once. `copy` and `new_buffer` are those of `HostMemory`."""

    def __init__(self, most_leaving: int, copy: Copy | None, new_buffer: Callable[[int], Tensor] | None) -> None:
        self._most_leaving = most_leaving
        self._copy = copy
        self._new_buffer = new_buffer
        self._leaving: deque[MovedGroup] = deque()  # those that may still have memory on the device
        self.num_bytes = 0  # on the host now
        self.most_bytes = 0  # since the start

    # These are made when something moves for the first time, since a process may choose its device before.

    @cached_property
    def blocks(self) -> HostBlocks:
        return HostBlocks(_is_on_gpu(), self._new_buffer)

    @cached_property
    def _to_host(self) -> CopyLane:
        return copy_lane(_is_on_gpu(), self._copy)

    @cached_property
    def _from_host(self) -> CopyLane:
        return copy_lane(_is_on_gpu(), self._copy)

    def make_room(self) -> None:
        """Wait for groups that leave, until one more may."""
        while len(self._leaving) >= self._most_leaving:
            self.settle_first()

    def settle_first(self) -> None:
        """Free the device's memory of the group that left first, if one may still have some."""
        if self._leaving:
            self._leaving.popleft().settle()

    def start_leaving(self, storages: list[Storage], span: AbstractContextManager) -> MovedGroup:
        """Start moving storages out; the copies run inside `span`. Raises MemoryError if the host is full."""
        blocks, when_free = self.blocks.take(sum(_aligned(storage.num_bytes) for storage in storages))
        departure = self._to_host.copy(_pairs(storages, blocks), when_free, span)
        group = MovedGroup(
            storages=storages,
            blocks=blocks,
            departure=departure,
            leaving=[storage.leave() for storage in storages],
        )
        if storages:
            self._leaving.append(group)
        self.num_bytes += group.num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        return group

    def start_back(self, group: MovedGroup, span: AbstractContextManager) -> None:
        """Start bringing a group back, inside `span`."""
        group.settle()
        self._remove(group)
        for storage in group.storages:
            storage.come_back()
        back = [(there, here) for here, there in _pairs(group.storages, group.blocks)]
        group.arrival = self._from_host.copy(back, group.departure, span)
        self.blocks.give_back(group.blocks, group.arrival)

    def bring_nothing(self, span: AbstractContextManager) -> None:
        """Run `span` in the lane of copies from the host, for a unit of which nothing has left."""
        self._from_host.copy([], None, span)

    def forget(self, group: MovedGroup) -> None:
        """Give up a group that nobody reads any more. Raises the error of a copy that has failed."""
        for storage in group.storages:
            storage.bring = None
        if group.arrival is None:
            # Copies to the host run one after another, so later ones need not wait.
            self._remove(group)
            self.blocks.give_back(group.blocks)
        else:
            group.arrive()  # else a late copy might overwrite later results

    def _remove(self, group: MovedGroup) -> None:
        """A group is on the host no more."""
        if group in self._leaving:
            self._leaving.remove(group)
        self.num_bytes -= group.num_bytes

    def end_step(self) -> None:
        """Forget what still leaves, at the end of a step, which may have failed; the blocks serve the next one."""
        self._leaving.clear()
        self.num_bytes = 0
        if "blocks" in vars(self):  # something has moved
            self.blocks.end_step()


def _is_on_gpu() -> bool:
    return torch.device(torch.cuda.current_device()).type == "cuda"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pairs(storages: Iterable[Storage], blocks: list[Tensor]) -> Pairs:
    """The bytes of storages on the device, and their places on the host: one after the other, across blocks."""
    pairs = []
    place = 0  # in the bytes of all blocks
    for storage in storages:
        here = storage.empty.new_empty(0, dtype=torch.uint8).set_(storage.here)
        while len(here):
            number, offset = divmod(place, len(blocks[0]))
            there = blocks[number][offset : offset + len(here)]
            pairs.append((here[: len(there)], there))
            here = here[len(there) :]
            place += len(there)
        place = _aligned(place)
    return pairs
