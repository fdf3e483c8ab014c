"""Bytes of tensors that are alive, counted by their storages."""

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Allocated(TorchDispatchMode):
    """Bytes of the storages made inside that are still alive: `now`, and at their `peak`; not those of `present`."""

    def __init__(self, present: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in present}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size
