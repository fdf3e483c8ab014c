"""Storages of the device that may leave it, and handles that stand for tensors meanwhile.

Tested in model/test_host_memory.py by test_layers_leave_and_come_back_one_by_one.
"""

from collections.abc import Callable
from functools import cache
from sys import getrefcount
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, UntypedStorage

SMALLEST = 1 << 12  # bytes; smaller storages stay, since every copy costs a launch


def free_values(tensor: Tensor) -> None:
    """Free the values of a tensor of which a backward needs the graph and the gradient only. It keeps its shape, which
    is that of the gradient."""
    tensor.data = tensor.new_empty(()).expand(tensor.shape)


class Storage:
    """A storage of the device, which leaves while its bytes are on the host. `leaves` are saved tensors that the graph
    refers to, for their gradients: the inputs of recomputed modules. The backward reads their values through handles.
    `bring` fetches the bytes while they are on the host.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._on_device: UntypedStorage | None = tensor.untyped_storage()
        self.num_bytes = self.here.nbytes()
        self.empty = tensor.new_empty(0)  # base of views on the same device
        self.leaves: list[Tensor] = []
        self.bring: Callable[[], object] | None = None

    @property
    def here(self) -> UntypedStorage:
        """The storage on the device, which must be there."""
        assert self._on_device is not None, "the bytes are on the host"
        return self._on_device

    def read(self) -> UntypedStorage:
        """The storage on the device, for a backward. Raises RuntimeError before the unit comes back."""
        if self.bring is not None:
            self.bring()
        return self.here

    def references(self) -> list[int]:
        """The reference counts of the leaves that still have this storage."""
        address = self.here._cdata
        return [getrefcount(leaf) for leaf in self.leaves if leaf.untyped_storage()._cdata == address]

    def may_leave(self) -> bool:
        """Whether only handles use it, and leaves that only the graph refers to."""
        own = 1 + self.references().count(references_to_free_leaf())
        return self.num_bytes >= SMALLEST and torch._C._storage_Use_Count(self.here._cdata) == own

    def leave(self) -> UntypedStorage:
        """Release the storage: from now on only the returned object keeps it on the device."""
        here = self.here
        for leaf in self.leaves:
            if leaf.untyped_storage()._cdata == here._cdata:
                free_values(leaf)
        self.leaves.clear()
        self._on_device = None
        return here

    def come_back(self) -> None:
        """Make a new storage on the device, into which the bytes are to be copied."""
        self._on_device = UntypedStorage(self.num_bytes, device=self.empty.device)


@cache
def references_to_free_leaf() -> int:
    """The count in `Storage.references` of a leaf that only the graph refers to; versions of PyTorch differ."""
    leaf = torch.ones(1, requires_grad=True)
    storage = Storage(leaf)
    _graph = leaf.sin()
    storage.leaves.append(leaf)
    del leaf
    return storage.references()[0]


class Handle(NamedTuple):
    """A view of a storage."""

    of: Storage
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of_view(cls, storage: Storage, view: Tensor) -> Self:
        """The handle of a tensor that views a storage."""
        return cls(
            of=storage,
            dtype=view.dtype,
            offset=view.storage_offset(),
            size=view.size(),
            stride=view.stride(),
        )

    def tensor(self) -> Tensor:
        """The tensor, for a backward."""
        empty = self.of.empty.new_empty(0, dtype=self.dtype)
        tensor = empty.set_(self.of.read(), self.offset, self.size, self.stride)
        if tensor.is_cuda:
            # Units that run beside each other read on two streams, and a storage that came back is of one.
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


def tensor_of(kept: Any) -> Any:
    """The tensor that `HostMemory.keep` was given, from the handle that it returned."""
    return kept.tensor() if isinstance(kept, Handle) else kept
