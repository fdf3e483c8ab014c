"""The storages of tensors that autograd saves in the forwards of units, while they are on the device.

Tested in model/test_host_memory.py by test_only_what_nothing_else_refers_to_moves.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .storages import Handle, Storage, references_to_free_leaf, tensor_of

_Storages = WeakValueDictionary[int, Storage]  # by address


class SavedStorages:
    """The saved storages of each unit. Only the graph keeps them, by the handles that it has instead of tensors."""

    def __init__(self) -> None:
        self._of_units: dict[Hashable, _Storages] = {}
        self._running: Hashable = None  # the unit whose forward runs
        self._of_running: _Storages | None = None

    @property
    def units(self) -> list[Hashable]:
        """Those that have run forward, and have not moved."""
        return [*self._of_units]

    @contextmanager
    def saving(self, unit: Hashable) -> Iterator[None]:
        """Inside, the forward of `unit` runs, or a part of it, and autograd saves what `keep` returns."""
        references_to_free_leaf()  # saves a tensor, which should be of no unit
        self._running = unit
        self._of_running = self._of_units.setdefault(unit, WeakValueDictionary())
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.keep, tensor_of):
                yield
        finally:
            self._of_running = None

    def keep(self, tensor: Any) -> Any:
        """A handle from which `tensor_of` gives the tensor back, or `tensor` itself if it may not move."""
        # Other types have attributes, or parts, that a view of their storage lacks.
        if self._of_running is None or type(tensor) is not Tensor:
            return tensor
        key = tensor.untyped_storage()._cdata
        storage = self._of_running.get(key)
        if storage is None:
            storage = Storage(tensor)
            self._of_running[key] = storage
        if tensor.is_leaf and tensor.requires_grad:
            storage.leaves.append(tensor)
        return Handle.of_view(storage, tensor)

    def running_unit(self) -> Hashable | None:
        """The unit whose forward runs; None between forwards."""
        return None if self._of_running is None else self._running

    def take_movable(self, unit: Hashable) -> list[Storage]:
        """Those of `unit` that may leave now, which are not among its own any more."""
        storages = self._of_units[unit]
        movable = [storage for storage in storages.values() if storage.may_leave()]
        for storage in movable:
            del storages[storage.here._cdata]  # a new one may have this address
        return movable

    def forget(self, unit: Hashable) -> None:
        """What is left of `unit` stays on the device."""
        del self._of_units[unit]

    def clear(self) -> None:
        self._of_units.clear()
