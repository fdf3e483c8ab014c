"""Counts the bytes of every storage that operators allocate, for as long as it lives."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .ledger import Category, Ledger
from .operators import workspace_bytes

_MESSAGES = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)


def _run(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class StorageCounter(TorchDispatchMode):
    """Enters every storage into `ledger` when it is allocated and when it is freed.

    It counts the bytes of tensors, not the blocks that an allocator rounds them to. What a GPU operator allocates
    during its call is counted for flash attention only, see `operators.py`. `run(function, args, kwargs)` runs an
    operator.
    """

    def __init__(self, ledger: Ledger, device: str, run: Callable[[Any, tuple, dict], Any] = _run) -> None:
        super().__init__()
        self.ledger = ledger
        self._run = run
        self.num_operators = 0
        self.on_message: Callable[[Any, tuple], None] | None = None
        self._groups: set[str] = set()
        self._with_workspace = device != "cpu"
        self._alive: dict[int, tuple[int | None, weakref.ref]] = {}  # None: made while paused
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and checking for that takes time at every operator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(function, args, kwargs or {})
        self.num_operators += 1
        if function.namespace == "c10d":
            self._communicates(function, args)
        if isinstance(result, torch.Tensor):
            self._note(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._note(item)
        if self._with_workspace:
            size = workspace_bytes(function, args)
            if size:
                self.ledger.pass_through(size)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside is not counted: tensors of the host, batches above all."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def label(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Record what the storages of `tensors` hold, from their births on."""
        for tensor in tensors:
            number, _ = self._alive.get(tensor.untyped_storage()._cdata, (None, None))
            if number is not None:
                self.ledger.label(number, category)

    @property
    def num_communicators(self) -> int:
        """Process groups of several ranks in which something was sent, received, reduced or gathered."""
        return len(self._groups)

    def _communicates(self, operator: Any, args: tuple) -> None:
        for argument in args:
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                group = dist.ProcessGroup.unbox(argument)
                if group.size() > 1:
                    self._groups.add(group.group_name)
        if operator in _MESSAGES and self.on_message is not None:
            self.on_message(operator, args)

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        if not size:
            return
        number = None if self._is_paused else self.ledger.birth(size)
        self._alive[key] = number, weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: Any) -> None:
        number, _ = self._alive.pop(key)
        if number is not None:
            self.ledger.death(number)

    def resize(self, resize: Callable) -> Callable:
        """`torch.UntypedStorage.resize_`, which no operator shows, counted."""

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            number, reference = self._alive.get(storage._cdata, (None, None))
            if number is not None:
                self.ledger.death(number)
                self._alive[storage._cdata] = self.ledger.birth(size), reference
            return result

        return counted
