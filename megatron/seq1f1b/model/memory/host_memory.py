"""Activations in host memory: tensors that a forward keeps for its backward move there, and back in time.

Within the forward of a unit every tensor that autograd saves becomes a handle (`saved_tensors_hooks`), and so do the
results of kept attention and, with the last segment, the keys and values of all. `offload` moves the storages that only
handles refer to, each once; moving parameters, rotary tables or masks would free nothing. The schedule determines when
(schedule/moves.py). Copies overlap with compute. On a GPU the host waits for nothing. On a CPU the memory of the host
is a second pool, so order and lifetimes are those of a GPU.

A unit moves as a whole, or layer by layer: what a layer has saved leaves when it has run, and comes back when the
backward reads what the layer behind it has saved.

    forward:   layer 0 | layer 1 | layer 2 | layer 3 |            backward:   layer 3 | layer 2 | layer 1 | layer 0
    leaves:            |    0         1        2         3        comes back:     2       1         0
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage

from .copies import Copy, CopyLane, Pairs, Wait
from .host_blocks import HostBlocks
from .storages import Handle, Storage, references_to_free_leaf, tensor_of

_ALIGNMENT = 1 << 9  # bytes


@dataclass(eq=False)
class _Group:
    """Storages of a unit that leave, and come back, together; those `leaving` may still be copied from. `arrival` waits
    for them, once they come back."""

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


@dataclass(eq=False)
class _Away:
    """What has left of a unit: the first layers first. It `comes_back` from RELOAD on."""

    groups: list[_Group] = field(default_factory=list)
    has_rest: bool = False  # the last group is what was still in use when the last layer had run
    comes_back: bool = False


class HostMemory:
    """The tensors that forwards keep for their backwards, on device or host, by unit; each unit moves once.

    With `layers_leaving` units move layer by layer: the end of a layer waits until at most so many leave. With 0 units
    move as a whole. A rehearsal, which has no values to move, gives its own `copy` and `new_buffer(num_bytes)`, that of
    a CPU.
    """

    def __init__(
        self,
        layers_leaving: int = 0,
        copy: Copy | None = None,
        new_buffer: Callable[[int], Tensor] | None = None,
    ) -> None:
        self._copy = copy
        self._new_buffer = new_buffer
        self.layers_leaving = layers_leaving
        # The unit that runs forward, and its storages by address; then those of all units on the device.
        self._unit: Hashable = None
        self._running: WeakValueDictionary[int, Storage] | None = None
        self._here: dict[Hashable, WeakValueDictionary[int, Storage]] = {}
        self._away: dict[Hashable, _Away] = {}
        self._leaving: deque[_Group] = deque()  # those that may still have memory on the device
        self.num_bytes = 0  # on the host now
        self.most_bytes = 0  # since the start

    @contextmanager
    def keeping(self, unit: Hashable) -> Iterator[None]:
        """Inside, the forward of `unit` runs, or a part of it; the tensors that autograd saves may move."""
        references_to_free_leaf()  # saves a tensor, which should be of no unit
        self._unit = unit
        self._running = self._here.setdefault(unit, WeakValueDictionary())
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.keep, tensor_of):
                yield
        finally:
            self._running = None

    def keep(self, tensor: Any) -> Any:
        """A handle from which `tensor_of` gives the tensor back, or `tensor` itself if it may not move."""
        # Other types have attributes, or parts, that a view of their storage lacks.
        if self._running is None or type(tensor) is not Tensor:
            return tensor
        key = tensor.untyped_storage()._cdata
        storage = self._running.get(key)
        if storage is None:
            storage = Storage(tensor)
            self._running[key] = storage
        if tensor.is_leaf and tensor.requires_grad:
            storage.leaves.append(tensor)
        return Handle.of_view(storage, tensor)

    # These are made when something moves for the first time, since a process may choose its device before.

    @cached_property
    def blocks(self) -> HostBlocks:
        return HostBlocks(_is_on_gpu(), self._new_buffer)

    @cached_property
    def _to_host(self) -> CopyLane:
        return CopyLane(_is_on_gpu(), self._copy)

    @cached_property
    def _from_host(self) -> CopyLane:
        return CopyLane(_is_on_gpu(), self._copy)

    def end_layer(self) -> None:
        """A layer of the unit that runs has ended: what it has saved leaves, if units move layer by layer."""
        if self.layers_leaving and self._running is not None:
            self._leave(self._unit, self._running, nullcontext())

    def offload(self, unit: Hashable, span: AbstractContextManager) -> None:
        """Start moving the tensors of `unit` that are still here; the copies run inside `span`. Raises MemoryError if
        the host is full."""
        rest = self._leave(unit, self._here.pop(unit), span)
        self._away[unit].has_rest = bool(rest.storages)

    def _leave(
        self, unit: Hashable, storages: WeakValueDictionary[int, Storage], span: AbstractContextManager
    ) -> _Group:
        """Start moving those of the storages that may leave."""
        while len(self._leaving) >= max(1, self.layers_leaving):
            self._leaving.popleft().settle()
        going = [storage for storage in storages.values() if storage.may_leave()]
        for storage in going:
            del storages[storage.here._cdata]  # a new one may have this address
        blocks, when_free = self.blocks.take(sum(_aligned(storage.num_bytes) for storage in going))
        departure = self._to_host.copy(_pairs(going, blocks), when_free, span)
        group = _Group(
            storages=going,
            blocks=blocks,
            departure=departure,
            leaving=[storage.leave() for storage in going],
        )
        away = self._away.setdefault(unit, _Away())
        if going:
            away.groups.append(group)
            self._leaving.append(group)
            for storage in going:
                storage.bring = partial(self._bring, unit, group)
        self.num_bytes += group.num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        return group

    def reload(self, unit: Hashable, span: AbstractContextManager) -> None:
        """Start bringing the tensors of `unit` back; layer by layer those of the last, which goes backward first."""
        away = self._away[unit]
        away.comes_back = True
        if not away.groups:
            self._from_host.copy([], None, span)
            return
        self._start_back(away.groups[-1], span)
        if away.has_rest and len(away.groups) > 1:  # the last layer is the group before the rest
            self._start_back(away.groups[-2], nullcontext())

    def wait(self, unit: Hashable) -> None:
        """Wait until all of `unit` is back, before its backward; layer by layer until its last layer is."""
        away = self._away[unit]
        if away.groups:
            self._bring(unit, away.groups[-1])
        else:
            del self._away[unit]

    def end_backward(self, unit: Hashable) -> None:
        """The backward of a unit that has moved is over. What it has not read is forgotten."""
        if unit in self._away:
            for group in self._away.pop(unit).groups:
                self._forget(group)

    def _start_back(self, group: _Group, span: AbstractContextManager) -> None:
        group.settle()
        if group in self._leaving:
            self._leaving.remove(group)
        for storage in group.storages:
            storage.come_back()
        self.num_bytes -= group.num_bytes
        back = [(there, here) for here, there in _pairs(group.storages, group.blocks)]
        group.arrival = self._from_host.copy(back, group.departure, span)
        self.blocks.give_back(group.blocks, group.arrival)

    def _bring(self, unit: Hashable, group: _Group) -> None:
        """Bring a group of a unit back, with those that left after it, and start to bring the one before it. Raises
        RuntimeError before the unit comes back."""
        away = self._away[unit]
        if not away.comes_back:
            raise RuntimeError("a saved tensor was read while it is in the memory of the host")
        while group in away.groups:
            last = away.groups.pop()
            if last.arrival is None:
                self._start_back(last, nullcontext())
            last.arrive()
            if self.layers_leaving and self._leaving:
                self._leaving.popleft().settle()
        if not away.groups:
            del self._away[unit]
        elif away.groups[-1].arrival is None:
            self._start_back(away.groups[-1], nullcontext())

    def _forget(self, group: _Group) -> None:
        if group in self._leaving:
            self._leaving.remove(group)
        if group.arrival is None:
            # Copies to the host run one after another, so later ones need not wait.
            self.num_bytes -= group.num_bytes
            self.blocks.give_back(group.blocks)
        else:
            group.arrive()  # else a late copy might overwrite later results
        for storage in group.storages:
            storage.bring = None

    def clear(self) -> None:
        """Forget everything but the blocks, at the end of a step, which may have failed."""
        for away in self._away.values():
            for group in away.groups:
                self._forget(group)
        self._here.clear()
        self._away.clear()
        self._leaving.clear()
        self.num_bytes = 0
        if "blocks" in vars(self):  # something has moved
            self.blocks.end_step()

    def assert_empty(self) -> None:
        units = [*self._here, *self._away]
        assert not units, f"activations outlived the step: {units}"


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
