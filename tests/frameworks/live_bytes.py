"""The bytes of tensors that live at once."""

import weakref
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within it, `peak` is the most bytes of tensors that were made in it and lived at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        for leaf in tree_leaves(result):
            if not _has_storage(leaf):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key not in before and key not in self._alive:
                self._alive[key] = weakref.ref(storage, partial(self._dies, key, storage.nbytes()))
                self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        return result

    def _dies(self, key: int, size: int, _: Any) -> None:
        del self._alive[key]
        self._now -= size


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_nested
