"""Activations in host memory: tensors that a forward keeps for its backward move there, and back in time.

Within the forward of a unit every tensor that autograd saves becomes a handle (`saved_tensors_hooks`), and so do the
results of kept attention and, with the last segment, the keys and values of all. `offload` moves the storages that only
handles refer to, each once; moving parameters, rotary tables or masks would free nothing. The schedule determines when
(schedule/moves.py). Copies overlap with compute. On a GPU the host waits for nothing. On a CPU the memory of the host
is a second pool, so order and lifetimes are those of a GPU.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage

from .copies import Copy, CopyLane, Pairs, Wait
from .host_blocks import HostBlocks

SMALLEST = 1 << 12  # bytes; smaller storages stay, since every copy costs a launch
_ALIGNMENT = 1 << 9  # bytes


class _Storage:
    """A storage of the device, which leaves while its bytes are on the host. `leaves` are saved tensors that the graph
    refers to, for their gradients: the inputs of recomputed modules. The backward reads their values through handles.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._on_device: UntypedStorage | None = tensor.untyped_storage()
        self.num_bytes = self.here.nbytes()
        self.empty = tensor.new_empty(0)  # base of views on the same device
        self.leaves: list[Tensor] = []

    @property
    def here(self) -> UntypedStorage:
        """Raises RuntimeError while the bytes are on the host."""
        if self._on_device is None:
            raise RuntimeError("a saved tensor was read while it is in the memory of the host")
        return self._on_device

    def references(self) -> list[int]:
        """The reference counts of the leaves that still have this storage."""
        address = self.here._cdata
        return [getrefcount(leaf) for leaf in self.leaves if leaf.untyped_storage()._cdata == address]

    def may_leave(self) -> bool:
        """Whether only handles use it, and leaves that only the graph refers to."""
        own = 1 + self.references().count(_references_to_free_leaf())
        return self.num_bytes >= SMALLEST and torch._C._storage_Use_Count(self.here._cdata) == own

    def leave(self) -> UntypedStorage:
        """Release the storage: from now on only the returned object keeps it on the device."""
        here = self.here
        for leaf in self.leaves:
            if leaf.untyped_storage()._cdata == here._cdata:
                leaf.data = leaf.new_empty(()).expand(leaf.shape)  # the shape of its gradient
        self.leaves.clear()
        self._on_device = None
        return here

    def come_back(self) -> None:
        """Have a storage on the device again, for the bytes that are copied to it."""
        self._on_device = UntypedStorage(self.num_bytes, device=self.empty.device)


@cache
def _references_to_free_leaf() -> int:
    """The count in `_Storage.references` of a leaf that only the graph refers to; versions of PyTorch differ."""
    leaf = torch.ones(1, requires_grad=True)
    storage = _Storage(leaf)
    _graph = leaf.sin()
    storage.leaves.append(leaf)
    del leaf
    return storage.references()[0]


class _Handle(NamedTuple):
    """A view of a storage."""

    of: _Storage
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        empty = self.of.empty.new_empty(0, dtype=self.dtype)
        tensor = empty.set_(self.of.here, self.offset, self.size, self.stride)
        if tensor.is_cuda:
            # Units that run beside each other read on two streams, and a storage that came back is of one.
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


class _Away(NamedTuple):
    """The storages of a unit on the host; those `leaving` may still be copied from."""

    storages: list[_Storage]
    blocks: list[Tensor]
    departure: Wait
    leaving: list[UntypedStorage]

    def settle(self) -> None:
        """Free the device memory of the unit."""
        if self.leaving:
            self.departure()
            self.leaving.clear()


class HostMemory:
    """The tensors that forwards keep for their backwards, on device or host, by unit; each unit moves once.

    A rehearsal, which has no values to move, gives its own `copy` and `new_buffer(num_bytes)`, that of a CPU.
    """

    def __init__(self, copy: Copy | None = None, new_buffer: Callable[[int], Tensor] | None = None) -> None:
        self._copy = copy
        self._new_buffer = new_buffer
        # Storages by address: of the unit that runs forward, and of those on the device.
        self._running: WeakValueDictionary[int, _Storage] | None = None
        self._here: dict[Hashable, WeakValueDictionary[int, _Storage]] = {}
        self._away: dict[Hashable, _Away] = {}
        self._arriving: dict[Hashable, Wait] = {}
        self.num_bytes = 0  # on the host now
        self.most_bytes = 0  # since the start

    @contextmanager
    def keeping(self, unit: Hashable) -> Iterator[None]:
        """Inside, the forward of `unit` runs, or a part of it; the tensors that autograd saves may move."""
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
            storage = _Storage(tensor)
            self._running[key] = storage
        if tensor.is_leaf and tensor.requires_grad:
            storage.leaves.append(tensor)
        return _Handle(
            of=storage,
            dtype=tensor.dtype,
            offset=tensor.storage_offset(),
            size=tensor.size(),
            stride=tensor.stride(),
        )

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

    def offload(self, unit: Hashable, span: AbstractContextManager) -> None:
        """Start moving the tensors of `unit`; the copies run inside `span`. Raises MemoryError if the host is full."""
        for away in self._away.values():
            away.settle()
        going = [storage for storage in self._here.pop(unit).values() if storage.may_leave()]
        blocks, when_free = self.blocks.take(sum(_aligned(storage.num_bytes) for storage in going))
        departure = self._to_host.copy(_pairs(going, blocks), when_free, span)
        self._away[unit] = _Away(
            storages=going,
            blocks=blocks,
            departure=departure,
            leaving=[storage.leave() for storage in going],
        )
        self.num_bytes += sum(storage.num_bytes for storage in going)
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def reload(self, unit: Hashable, span: AbstractContextManager) -> None:
        """Start bringing the tensors of `unit` back."""
        self._away[unit].settle()
        storages, blocks, departure, _ = self._away.pop(unit)
        for storage in storages:
            storage.come_back()
            self.num_bytes -= storage.num_bytes
        back = [(there, here) for here, there in _pairs(storages, blocks)]
        arrival = self._from_host.copy(back, departure, span)
        self._arriving[unit] = arrival
        self.blocks.give_back(blocks, arrival)

    def wait(self, unit: Hashable) -> None:
        """Wait until all of `unit` is back, before its backward."""
        self._arriving.pop(unit)()

    def clear(self) -> None:
        """Forget everything but the blocks, at the end of a step, which may have failed."""
        for arrival in self._arriving.values():  # else a late copy might overwrite later results
            arrival()
        for away in self._away.values():
            # Copies to the host run one after another, so later ones need not wait.
            self.blocks.give_back(away.blocks)
        self._here.clear()
        self._away.clear()
        self._arriving.clear()
        self.num_bytes = 0
        if "blocks" in vars(self):  # something has moved
            self.blocks.end_step()

    def assert_empty(self) -> None:
        units = [*self._here, *self._away, *self._arriving]
        assert not units, f"activations outlived the step: {units}"


def _is_on_gpu() -> bool:
    return torch.device(torch.cuda.current_device()).type == "cuda"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pairs(storages: Iterable[_Storage], blocks: list[Tensor]) -> Pairs:
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


def tensor_of(kept: Any) -> Any:
    """The tensor that `HostMemory.keep` was given."""
    return kept.tensor() if isinstance(kept, _Handle) else kept
