"""Activations in host memory: tensors that a forward keeps for its backward move there, and back in time.

Within the forward of a unit every tensor that autograd saves becomes a handle (`saved_tensors_hooks`), and so do the
results of kept attention and, with the last segment, the keys and values of all. `offload` moves the storages that only
handles refer to, each once; moving parameters, rotary tables or masks would free nothing. The schedule determines when
(schedule/moves.py). Copies overlap with compute. On a GPU buffers are pinned, and the host waits for nothing. On a CPU
the memory of the host is a second pool, of mapped files, so order and lifetimes are those of a GPU.

To pin memory takes the host 0.2 to 0.6 s a GiB, and what is launched meanwhile may wait for all that runs on the GPU,
receives included. The first step that moves anything has none under way then (see `goes_in_turn` in
runtime/communication.py). If a later step needs more, its further buffers are not pinned until it has ended; copies to
those take the host's time, and need nothing of other ranks that has not been sent.
"""

import os
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property
from sys import getrefcount
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage

# What measures the link takes milliseconds on a GPU.
_PROBE = 1 << 24  # bytes
_ROUNDS = 16  # copies each way
SMALLEST = 1 << 12  # bytes; smaller storages stay, since every copy costs a launch
_ALIGNMENT = 1 << 9  # bytes
# Host memory is taken in blocks, since units differ in size. Pinning many small blocks would take long; PyTorch rounds
# the size of pinned ones up to a power of two.
_BLOCK = 1 << 20
_PINNED_BLOCK = 1 << 24

Wait = Callable[[], object]  # for the end of copies: the running stream waits on a GPU, the running thread on a CPU
Pairs = list[tuple[Tensor, Tensor]]  # source and target, of one size
Copy = Callable[[Pairs, Wait | None, AbstractContextManager], None]


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


class _UnusedBlock(NamedTuple):
    """Host memory for later units and steps. `end` waits for the last copy from it, if one may still run."""

    block: Tensor
    end: Wait | None


class CopyLane:
    """The copies of one direction, which run one after another: in a stream of a GPU, or in a thread on a CPU. A
    `copy(pairs, after, span)` does what `_copy` does."""

    def __init__(self, is_on_gpu: bool, copy: Copy | None = None) -> None:
        self._copy = copy or _copy
        self._runs_in = torch.cuda.Stream() if is_on_gpu else ThreadPoolExecutor(1, "seq1f1b-copies")

    def copy(self, pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> Wait:
        """Start copies once `after` is over, inside `span`; they empty `pairs`. Tensors must outlive the wait."""
        if isinstance(self._runs_in, ThreadPoolExecutor):
            return self._runs_in.submit(self._copy, pairs, after, span).result
        stream = self._runs_in
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._copy(pairs, after, span)
            return stream.record_event().wait


def _copy(pairs: Pairs, after: Wait | None, span: AbstractContextManager) -> None:
    """Copy each pair once `after` is over, inside `span`; empties `pairs`."""
    if after is not None:
        after()
    with span:
        while pairs:  # removes them, so that an idle thread keeps no tensor alive
            source, target = pairs.pop()
            target.copy_(source, non_blocking=True)


class HostMemory:
    """The tensors that forwards keep for their backwards, on device or host, by unit; each unit moves once.

    A rehearsal, which has no values to move, gives its own `copy` and `new_buffer(num_bytes)`, that of a CPU.
    """

    def __init__(self, copy: Copy | None = None, new_buffer: Callable[[int], Tensor] | None = None) -> None:
        self._copy = copy
        self._new_buffer = new_buffer or mapped_buffer
        # Storages by address: of the unit that runs forward, and of those on the device.
        self._running: WeakValueDictionary[int, _Storage] | None = None
        self._here: dict[Hashable, WeakValueDictionary[int, _Storage]] = {}
        self._away: dict[Hashable, _Away] = {}
        self._arriving: dict[Hashable, Wait] = {}
        self._unused: list[_UnusedBlock] = []  # the longest unused come first
        self._may_pin = True  # no step that moves anything has ended
        self._unpinned: set[int] = set()  # blocks to be pinned at the end of the step, by their address
        self.num_bytes = self.most_bytes = 0

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
        kept = self._running.get(key)
        if kept is None:
            kept = self._running[key] = _Storage(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            kept.leaves.append(tensor)
        return _Handle(
            of=kept,
            dtype=tensor.dtype,
            offset=tensor.storage_offset(),
            size=tensor.size(),
            stride=tensor.stride(),
        )

    @cached_property
    def _is_on_gpu(self) -> bool:
        return torch.device(torch.cuda.current_device()).type == "cuda"

    @cached_property
    def _lanes(self) -> tuple[CopyLane, CopyLane]:
        return CopyLane(self._is_on_gpu, self._copy), CopyLane(self._is_on_gpu, self._copy)  # out, and back

    def offload(self, unit: Hashable, span: AbstractContextManager) -> None:
        """Start moving the tensors of `unit`; the copies run inside `span`. Raises MemoryError if the host is full."""
        for away in self._away.values():
            away.settle()
        going = [each for each in self._here.pop(unit).values() if each.may_leave()]
        blocks, after = self._blocks(sum(_aligned(each.num_bytes) for each in going))
        departure = self._lanes[0].copy(_pairs(going, blocks), after, span)
        self._away[unit] = _Away(
            storages=going,
            blocks=blocks,
            departure=departure,
            leaving=[each.leave() for each in going],
        )
        self.num_bytes += sum(each.num_bytes for each in going)
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def reload(self, unit: Hashable, span: AbstractContextManager) -> None:
        """Start bringing the tensors of `unit` back."""
        self._away[unit].settle()
        storages, blocks, departure, _ = self._away.pop(unit)
        for storage in storages:
            storage.come_back()
            self.num_bytes -= storage.num_bytes
        back = [(there, here) for here, there in _pairs(storages, blocks)]
        arrival = self._arriving[unit] = self._lanes[1].copy(back, departure, span)
        self._unused += [_UnusedBlock(block, arrival) for block in blocks]

    def wait(self, unit: Hashable) -> None:
        """Wait until all of `unit` is back, before its backward."""
        self._arriving.pop(unit)()

    def clear(self) -> None:
        """Forget everything but the blocks, at the end of a step, which may have failed; pin those that are not."""
        for arrival in self._arriving.values():  # else a late copy might overwrite later results
            arrival()
        # Copies to the host run one after another, so later ones need not wait.
        self._unused += [_UnusedBlock(block, None) for each in self._away.values() for block in each.blocks]
        for units in (self._here, self._away, self._arriving):
            units.clear()
        self.num_bytes = 0
        if self._unused:
            self._may_pin = False
        if self._unpinned:
            number = len(self._unpinned)
            self._unused = [each for each in self._unused if each.block.data_ptr() not in self._unpinned]
            self._unpinned.clear()
            self._unused += [_UnusedBlock(block, None) for block in _made(number, _PINNED_BLOCK, pinned_buffer)]

    def assert_empty(self) -> None:
        units = [*self._here, *self._away, *self._arriving]
        assert not units, f"activations outlived the step: {units}"

    def _blocks(self, num_bytes: int) -> tuple[list[Tensor], Wait]:
        """Unused blocks, and new ones if there are too few, with a wait for the last copies from them."""
        size = _PINNED_BLOCK if self._is_on_gpu else _BLOCK
        count = -(-num_bytes // size)
        missing = count - len(self._unused)
        if missing > 0:
            self._unused += [_UnusedBlock(block, None) for block in self._new_blocks(missing, size)]
        chosen = self._unused[:count]
        self._unused = self._unused[count:]
        ends = dict.fromkeys(each.end for each in chosen if each.end is not None)

        def after() -> None:
            for end in ends:
                end()

        return [each.block for each in chosen], after

    def _new_blocks(self, number: int, size: int) -> list[Tensor]:
        if not self._is_on_gpu:
            return _made(number, size, self._new_buffer)
        if self._may_pin:
            return _made(number, size, pinned_buffer)
        blocks = _made(number, size, pageable_buffer)
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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pairs(storages: Iterable[_Storage], blocks: list[Tensor]) -> Pairs:
    """The bytes of storages on the device, and their places on the host: one after the other, across blocks."""
    found = []
    place = 0
    for storage in storages:
        here = storage.empty.new_empty(0, dtype=torch.uint8).set_(storage.here)
        while len(here):
            number, offset = divmod(place, len(blocks[0]))
            there = blocks[number][offset : offset + len(here)]
            found.append((here[: len(there)], there))
            here = here[len(there) :]
            place += len(there)
        place = _aligned(place)
    return found


def tensor_of(kept: Any) -> Any:
    """The tensor that `HostMemory.keep` was given."""
    return kept.tensor() if isinstance(kept, _Handle) else kept


def link_rate(device: torch.device, when_ready: Callable[[], object]) -> float:
    """Bytes/s between a device and its host, each way while both are in use; `when_ready` lets ranks start together."""
    is_on_gpu = device.type == "cuda"
    lanes = CopyLane(is_on_gpu), CopyLane(is_on_gpu)
    here = torch.empty(2, _PROBE, dtype=torch.uint8, device=device)
    there = torch.empty(2, _PROBE, dtype=torch.uint8, pin_memory=is_on_gpu)
    pairs = (here[0], there[0]), (there[1], here[1])
    for rounds in (1, _ROUNDS):  # the first touches all pages
        when_ready()
        start = perf_counter()
        for end in [lane.copy([pair] * rounds, None, nullcontext()) for lane, pair in zip(lanes, pairs, strict=True)]:
            end()
        if is_on_gpu:
            torch.cuda.synchronize()
    return _ROUNDS * _PROBE / (perf_counter() - start)


def pinned_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def pageable_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def mapped_buffer(num_bytes: int) -> Tensor:
    """Bytes of an unnamed temporary file. Raises OSError if the disk is full."""
    with tempfile.NamedTemporaryFile(prefix="seq1f1b-") as file:  # the mapping outlives it
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full disk would kill the process
        return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
