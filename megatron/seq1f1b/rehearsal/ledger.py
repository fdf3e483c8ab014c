"""The bytes in memory at every moment of a step, from the births and deaths of storages."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ..report.colours import NAMES
from ..schedule import parse_action

_MESSAGES = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
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


def at(moment: str) -> str:
    """When something happens, in words: `2F3.1` is in the forward of stage 2 for segment 1 of micro-batch 3."""
    if moment in _OTHER_MOMENTS:
        return _OTHER_MOMENTS[moment]
    kind, stage, microbatch, segment = parse_action(moment.removeprefix("after "))
    when = "after" if moment.startswith("after ") else "in"
    return f"{when} the {NAMES[kind]} of stage {stage} for segment {segment} of micro-batch {microbatch}"


_OTHER_MOMENTS = {
    "build": "while the model is built",
    "first optimizer step": "in the first step of the optimizer",
    "step begins": "before the first forward",
    "optimizer step": "in the step of the optimizer",
}


class Ledger:
    """Entries are made in the order of time. A category given later holds from the birth of the storage on.

    `default` is the category of what is born from now on, until it is set again.
    """

    def __init__(self) -> None:
        self.default = Category.ACTIVATIONS
        self._sizes: list[int] = []
        self._categories: list[Category] = []
        # A birth is n + 1, a death -(n + 1) for storage n, the start of a moment is a string, bytes that come and go
        # within one operator are a tuple.
        self._log: list[int | str | tuple[int]] = []

    def begin(self, moment: str) -> None:
        """What follows belongs to `moment`."""
        self._log.append(moment)

    def birth(self, size: int) -> int:
        """The number of a new storage of `size` bytes."""
        number = len(self._sizes)
        self._sizes.append(size)
        self._categories.append(self.default)
        self._log.append(number + 1)
        return number

    def death(self, number: int) -> None:
        self._log.append(-number - 1)

    def pass_through(self, size: int) -> None:
        """`size` bytes were there for the length of one operator."""
        self._log.append((size,))

    def label(self, number: int, category: Category) -> None:
        self._categories[number] = category

    def moments(self) -> Iterator[Moment]:
        """All moments in order. Activations that are born and die within one are temporaries."""
        categories = self._with_temporaries()
        now: Counter[Category] = Counter()
        peak: dict[Category, int] = {}
        total = highest = 0
        name, is_rising = "", False
        for entry in self._log:
            if isinstance(entry, int) and entry > 0:
                now[categories[entry - 1]] += self._sizes[entry - 1]
                total += self._sizes[entry - 1]
                if total > highest:
                    highest, is_rising = total, True
                continue
            if is_rising:  # categories are final here, so they are read only now
                peak, is_rising = dict(now), False
            if isinstance(entry, str):
                if name:
                    yield Moment(name, peak, total)
                name, highest, peak = entry, total, dict(now)
            elif isinstance(entry, tuple):
                if total + entry[0] > highest:
                    highest, peak = total + entry[0], dict(now + Counter({Category.TEMPORARY: entry[0]}))
            else:
                now[categories[-entry - 1]] -= self._sizes[-entry - 1]
                total -= self._sizes[-entry - 1]
        if name:
            yield Moment(name, dict(now) if is_rising else peak, total)

    def _with_temporaries(self) -> list[Category]:
        categories = list(self._categories)
        born_in: dict[int, int] = {}
        moment = 0
        for entry in self._log:
            if isinstance(entry, str):
                moment += 1
            elif isinstance(entry, int):
                number = abs(entry) - 1
                if entry > 0:
                    born_in[number] = moment
                elif born_in[number] == moment and categories[number] is Category.ACTIVATIONS:
                    categories[number] = Category.TEMPORARY
        return categories


class StorageCounter(TorchDispatchMode):
    """Enters every storage into `ledger` when it is allocated and when it is freed.

    It counts the bytes of tensors, not the blocks that an allocator rounds them to, and for flash attention what its
    kernel allocates during the call. `run(function, args, kwargs)` runs an operator.
    """

    def __init__(self, ledger: Ledger, device: str, run: Callable[[Any, tuple, dict], Any] | None = None) -> None:
        super().__init__()
        self.ledger = ledger
        self._run = run or (lambda function, args, kwargs: function(*args, **kwargs))
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
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self._note(item)
        if self._with_workspace and (size := workspace_bytes(function, args)):
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
