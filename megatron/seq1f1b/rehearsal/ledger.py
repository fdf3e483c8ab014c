"""The bytes in memory at every moment of a step, from the births and deaths of storages."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..report.colours import NAMES
from ..schedule import parse_action

_FLASH_BACKWARD = torch.ops.aten._flash_attention_backward.default
_ROWS = 128  # flash attention rounds the number of queries up to this


class Category(StrEnum):
    """What a storage holds."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    STATE = "keys and values"
    LOGITS = "logits"
    MESSAGES = "messages"
    TEMPORARY = "temporaries"


@dataclass(frozen=True)
class Moment:
    """One action of a step: bytes by category at its highest point, and bytes in all when it ends."""

    name: str
    peak: dict[Category, int]
    end: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


_OTHER_MOMENTS = {
    "build": "while the model is built",
    "first optimizer step": "in the first step of the optimizer",
    "step begins": "before the first forward",
    "optimizer step": "in the step of the optimizer",
}


def at(moment: str) -> str:
    """When something happens, in words: `2F3.1` is in the forward of stage 2 for segment 1 of micro-batch 3."""
    if moment in _OTHER_MOMENTS:
        return _OTHER_MOMENTS[moment]
    kind, stage, microbatch, segment = parse_action(moment.removeprefix("after "))
    when = "after" if moment.startswith("after ") else "in"
    return f"{when} the {NAMES[kind]} of stage {stage} for segment {segment} of micro-batch {microbatch}"


class Ledger:
    """Entries are made in the order of time. A category given later holds from the birth of the storage on."""

    def __init__(self) -> None:
        self.moment = ""
        self._default = Category.ACTIVATIONS
        self._begins: list[tuple[str, int]] = []  # the name of each moment, and how many entries are before it
        self._entries: list[int] = []  # storage n is born: n; it dies: ~n
        self._sizes: list[int] = []
        self._categories: list[Category] = []

    def begin(self, moment: str, default: Category = Category.ACTIVATIONS) -> None:
        """What follows belongs to `moment`; storages that are born in it hold `default` until they are labelled."""
        self.moment = moment
        self._begins.append((moment, len(self._entries)))
        self.fill_with(default)

    def fill_with(self, default: Category) -> None:
        """Storages that are born from now on hold `default`."""
        self._default = default

    def birth(self, size: int) -> int:
        """The number of a new storage of `size` bytes."""
        number = len(self._sizes)
        self._sizes.append(size)
        self._categories.append(self._default)
        self._entries.append(number)
        return number

    def death(self, number: int) -> None:
        self._entries.append(~number)

    def label(self, number: int, category: Category) -> None:
        self._categories[number] = category

    def resize(self, number: int, size: int) -> int:
        """Storage `number` dies, and is born again for the same purpose; the number that it has then."""
        self.death(number)
        born = self.birth(size)
        self.label(born, self._categories[number])
        return born

    def moments(self) -> Iterator[Moment]:
        """All moments in order. Activations that are born and die within one are temporaries."""
        names = list(Category)
        entries, sizes = np.array(self._entries, np.int64), np.array(self._sizes, np.int64)
        categories = np.array([names.index(category) for category in self._categories], np.int64)
        starts = [start for _, start in self._begins]
        is_birth = entries >= 0
        numbers = np.where(is_birth, entries, ~entries)
        moments = np.searchsorted(starts, np.arange(len(entries)), side="right")
        died_in = np.full(len(sizes), -1)
        died_in[numbers[~is_birth]] = moments[~is_birth]
        is_short = (died_in == moments[is_birth]) & (categories == names.index(Category.ACTIVATIONS))
        categories[is_short] = names.index(Category.TEMPORARY)

        held = np.zeros((len(names), len(entries) + 1), np.int64)  # by category, before and after each entry
        held[categories[numbers], np.arange(len(entries)) + 1] = np.where(is_birth, sizes[numbers], -sizes[numbers])
        held.cumsum(axis=1, out=held)
        in_all = held.sum(axis=0)
        for (name, start), end in zip(self._begins, [*starts[1:], len(entries)], strict=True):
            highest = start + int(in_all[start : end + 1].argmax())
            peak = {category: int(size) for category, size in zip(names, held[:, highest], strict=True) if size}
            yield Moment(name, peak, int(in_all[end]))


class StorageCounter(TorchDispatchMode):
    """Enters every storage into `ledger` when it is allocated and when it is freed.

    It counts the bytes of tensors, not the blocks that an allocator rounds them to, and for flash attention what its
    kernel allocates during the call. `run(function, args, kwargs)` runs an operator, and `on_communication` is called
    with each operator of torch.distributed and its arguments.
    """

    def __init__(self, device: str, run: Callable[[Any, tuple, dict], Any] | None = None) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.on_communication: Callable[[Any, tuple], None] = lambda operator, args: None
        self._run = run or (lambda function, args, kwargs: function(*args, **kwargs))
        self._with_workspace = device != "cpu"
        self._alive: dict[int, tuple[int | None, weakref.ref]] = {}  # None: made while paused
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and checking for that takes time at every operator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(function, args, kwargs or {})
        if function.namespace == "c10d":
            self.on_communication(function, args)
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self._note(item)
        if self._with_workspace and (size := workspace_bytes(function, args)):
            number = self.ledger.birth(size)
            self.ledger.label(number, Category.TEMPORARY)
            self.ledger.death(number)
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
                self._alive[storage._cdata] = self.ledger.resize(number, size), reference
            return result

        return counted


def workspace_bytes(operator: Any, args: Sequence[Any]) -> int:
    """Bytes of PyTorch's allocator that `operator` holds while it runs, beyond what it returns; 0 where none is known.

    The backward of flash attention 2 sums the gradient of the queries in fp32 before it rounds, at a head size that is
    a multiple of 32 (64 above 128), keeps one fp32 number a query and head (`dq_accum` and `softmax_d` in mha_bwd of
    pytorch/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), and for grouped KV heads makes gradients
    of keys and values for every query head.
    """
    if operator is not _FLASH_BACKWARD:
        return 0
    query, key = args[1], args[2]
    *_, length, heads, size = query.shape if query.dim() == 4 else (1, *query.shape)
    sequences = query.shape[0] if query.dim() == 4 else 1
    rows = -(-length // _ROWS) * _ROWS
    step = 32 if size <= 128 else 64
    padded = min(-(-size // step) * step, 256)
    in_fp32 = 4 * sequences * heads * rows * (padded + 1)
    kv_heads = key.shape[-2]
    expanded = 2 * key.numel() // kv_heads * heads * key.element_size() if kv_heads != heads else 0
    return in_fp32 + expanded
